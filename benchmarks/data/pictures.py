"""Pictures of any size from the photographs that scikit-image ships, with grain as of a camera."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from minato_gpu.extras import from_extra
from pipelines.example_photographs import COLOUR, photograph

with from_extra("bench"):
    import cv2

NAMES = COLOUR


@cache
def _source(name: str) -> Any:
    return photograph(name)


def picture(height: int, width: int, rng: np.random.Generator) -> Any:
    """uint8 (height, width, 3), blue first: a part of a photograph in colour, resized.

    Grain is added because an enlarged photograph is smooth and would decode faster than a camera's picture.
    """
    source = _source(NAMES[int(rng.integers(len(NAMES)))])
    part = _part(source, height / width, rng)
    shrinks = height < part.shape[0]
    resized = cv2.resize(part, (width, height), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_CUBIC)
    rows = min(64, height)
    strip = (rng.standard_normal((rows, *resized.shape[1:]), dtype=np.float32) * 4).astype(np.int16)
    grain = np.tile(strip, (-(-height // rows), 1, 1))[:height]
    return np.clip(resized.astype(np.int16) + grain, 0, 255).astype(np.uint8)


def _part(source: Any, shape: float, rng: np.random.Generator) -> Any:
    """A random part whose height is ``shape`` times its width, at least 0.7 of the largest that fits."""
    height, width = source.shape[:2]
    largest = min(width, height / shape)
    wide = max(1, int(largest * rng.uniform(0.7, 1.0)))
    high = max(1, min(height, round(wide * shape)))
    top, left = int(rng.integers(height - high + 1)), int(rng.integers(width - wide + 1))
    return source[top : top + high, left : left + wide]
