"""A program that ``test_limits`` starts: it ignores SIGCHLD, so no process's exit code is known.

Arguments: the key at which a worker is killed, once (or none: -1), and the loader's ``on_worker_death``. It says the
sum of the samples, or the error.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import sys
from typing import Any

from minato_gpu import DataLoader
from tests.contracts.datasets import Deadly, Sourced


def main(killed: int, on_worker_death: str) -> None:
    """Run the epoch."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    more: dict[str, Any] = {"num_workers": 2, "cache": "8MB", "on_worker_death": on_worker_death}
    try:
        said = str(sum(int(batch.sum()) for batch in DataLoader(Sourced(64, Deadly(killed)), 4, **more)))
    except RuntimeError as error:
        said = f"{type(error).__name__} {error}"
    sys.stdout.write(f"{said}\n")
    assert not multiprocessing.active_children()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
