"""A training script for a pipeline, whose step is a wait of so many seconds: what ``analyze --pipeline`` runs."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from time import sleep
from typing import Any


def loader_of(module_name: str, data: str, batch_size: int, workers: int) -> Any:
    """minato_gpu's loader over the module's data set in that folder."""
    from minato_gpu import DataLoader

    module = import_module(module_name)
    collate: dict[str, Any] = {"collate_fn": module.pad_batch} if hasattr(module, "pad_batch") else {}
    dataset, pipeline = module.dataset(data), module.pipeline()
    if not len(dataset):
        raise ValueError(f"there are no samples in {data!r}")
    return DataLoader(dataset, batch_size, True, num_workers=workers, pipeline=pipeline, **collate)


def main() -> None:
    """Train, so to say, until the analysis has seen enough."""
    given = json.loads(sys.argv[1])
    loader = loader_of(given["module"], given["data"], given["batch_size"], given["workers"])
    while True:
        for _ in loader:
            sleep(given["step_s"])


if __name__ == "__main__":
    main()
