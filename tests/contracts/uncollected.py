"""A program that ``test_limits`` starts: it ignores SIGCHLD, so no process's exit code is known.

Arguments: a folder of files whose names are numbers, the one of them at which a worker is killed (or none: -1), and the
loader's ``on_worker_death``. It says the sum of the samples, or the error.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from minato_gpu import DataLoader, Source, read_bytes


class Files:
    """Samples are what is in the files; ``killed`` (a file that goes with it) ends its worker, the first time."""

    def __init__(self, root: Path, killed: int) -> None:
        self._root, self._killed = root, killed
        self._once = multiprocessing.get_context("fork").Value("i", 0, lock=False)

    def __len__(self) -> int:
        return sum(1 for _ in self._root.iterdir())

    def source(self, key: int) -> Source:
        return Source(str(self._root / str(key)))

    def __getitem__(self, key: int) -> torch.Tensor:
        if key == self._killed and not self._once.value:
            self._once.value = 1
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.frombuffer(bytearray(read_bytes(self.source(key))), dtype=torch.uint8)


def main(root: str, killed: int, on_worker_death: str) -> None:
    """Run the epoch."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    more: dict[str, Any] = {"num_workers": 2, "cache": "8MB", "on_worker_death": on_worker_death}
    samples: Any = Files(Path(root), killed)
    try:
        said = str(sum(int(batch.sum()) for batch in DataLoader(samples, 4, **more)))
    except RuntimeError as error:
        said = f"{type(error).__name__} {error}"
    sys.stdout.write(f"{said}\n")
    assert not multiprocessing.active_children()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
