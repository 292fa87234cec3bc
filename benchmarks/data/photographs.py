"""Photographs in class folders: the demonstration's, whose sizes are log-normal from 0.05 to 12 megapixels.

No spread of cost is published for this workload; the one measured here is printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from minato_gpu.lab.demo.photographs import make


def write(directory: Path, count: int, seed: int) -> Iterator[int]:
    """Write ``count`` photographs; yields how many are done (all at once). Raises DataSetError for fewer than 15."""
    directory.rmdir()  # ``make`` moves a finished folder into its place
    make(directory, count, seed)
    yield count
