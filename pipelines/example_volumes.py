"""Writes a few small volumes with labels, for checks and tests, from photographs that scikit-image ships.

A slice of a volume is a photograph, shifted and dimmed from slice to slice; its labels are where the picture is bright.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

_SHAPES = ((40, 150, 140), (70, 133, 201), (9, 64, 50))  # the last is smaller than any patch


def write(directory: str | Path) -> None:
    """Writes cases in the NumPy layout: ``directory``/case_00000_x.npy with case_00000_y.npy, and so on."""
    from .example_photographs import photograph  # OpenCV, which nothing else of this workload needs

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for number, shape in enumerate(_SHAPES):
        image, label = volume(shape, photograph("camera.png"))
        stem = directory / f"case_{number:05}"
        np.save(f"{stem}_x.npy", image[None] if number == 1 else image)
        np.save(f"{stem}_y.npy", label[None] if number == 1 else label)


def volume(shape: tuple[int, int, int], picture: Any) -> tuple[Any, Any]:
    """Image (float32, about 0 to 1) and label (uint8; 0, 1, and 2 where it is brightest) of this shape."""
    depth, height, width = shape
    rows = np.arange(height)[None, :, None] + 2 * np.arange(depth)[:, None, None]
    columns = np.arange(width)[None, None, :] + np.arange(depth)[:, None, None]
    dimmed = np.linspace(1.0, 0.6, depth, dtype=np.float32)[:, None, None]
    image = picture[rows % picture.shape[0], columns % picture.shape[1]].astype(np.float32) / 255 * dimmed
    label = (image > 0.75).astype(np.uint8) + (image > 0.9).astype(np.uint8)
    return image, label
