"""A worker is spawned in a clone, from its folder, and imports this file again. Argument: a folder for example data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from minato_gpu import DataLoader
from pipelines import segmentation_3d


def main(folder: Path) -> None:
    """Say how many samples there are, and how many batches of one came."""
    segmentation_3d.example_data(folder)
    found = segmentation_3d.dataset(folder)
    data: Any = [found[number] for number in range(len(found))]  # without a source: another process would read it ahead
    loader: DataLoader[Any] = DataLoader(
        data, 1, num_workers=1, multiprocessing_context="spawn", pipeline=segmentation_3d.pipeline(), lanes=("cpu",)
    )
    sys.stdout.write(f"{len(data)} {sum(1 for _ in loader)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
