"""Photographs with outlined objects in COCO's layout; and pictures of any size from those that scikit-image ships.

What a sample costs is decided by two sizes: that of the file, which is decoded, and that of the picture which it
becomes, 800 pixels on its shorter side unless the longer one would exceed 1,333. The cheap ones are therefore long
and narrow, the costly ones large.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data.published import SPREADS, Array, Curve, costs
from minato_gpu.util.messages import from_extra
from pipelines import object_detection
from pipelines.example_photographs import COLOUR, photograph

with from_extra("bench"):
    import cv2

_source = cache(photograph)


def picture(height: int, width: int, rng: np.random.Generator) -> Any:
    """uint8 (height, width, 3), blue first: a part of a photograph in colour, resized.

    Grain is added because an enlarged photograph is smooth and would decode faster than a camera's picture.
    """
    source = _source(COLOUR[int(rng.integers(len(COLOUR)))])
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


# --- the data set -----------------------------------------------------------------------------------------------------


SPLIT = "train"
_NARROW, _USUAL, _LARGE = (0.03e6, 6.0), (0.3e6, 4 / 3), (12e6, 4 / 3)  # pixels, width / height
_PROBES = np.linspace(1.0, 3.0, 25)
_MIDDLE = 2.0
_QUALITY = 90  # of all: how much detail is coded changes the cost of decoding as much as the size does


def write(directory: Path, count: int) -> Iterator[int]:
    """Write ``count`` photographs; yields how many are done. Raises ValueError where no size costs enough."""
    relative = SPREADS["object_detection"].relative(count)
    curve = _curve()
    middle = float(curve.seconds(np.array([_MIDDLE]))[0])
    sizes = np.random.default_rng(0).permutation(curve.sizes(middle * relative))
    yield from _write(directory, sizes)


def _curve() -> Curve:
    """Seconds by size, measured on a few photographs of each."""
    each = 5
    with tempfile.TemporaryDirectory() as scratch:
        for _ in _write(Path(scratch), np.repeat(_PROBES, each)):
            pass
        dataset = object_detection.dataset(scratch)
        seconds = costs(dataset, object_detection.pipeline(), range(len(dataset)))
    return Curve(_PROBES.tolist(), np.median(seconds.reshape(-1, each), axis=1).tolist())


def _write(directory: Path, sizes: Array) -> Iterator[int]:
    images, annotations = directory / SPLIT, directory / "annotations"
    images.mkdir(parents=True, exist_ok=True)
    annotations.mkdir(exist_ok=True)
    rows: list[dict[str, Any]] = []
    objects: list[dict[str, Any]] = []
    for number, size in enumerate(sizes.tolist()):
        rng = np.random.default_rng([0, number])
        height, width = _dimensions(size)
        name = f"{number:012}.jpg"
        quality = [cv2.IMWRITE_JPEG_QUALITY, _QUALITY]
        if not cv2.imwrite(str(images / name), picture(height, width, rng), quality):
            raise OSError(f"OpenCV could not write {images / name}")
        rows.append({"id": number, "file_name": name, "height": height, "width": width})
        objects += _objects(number, len(objects), height, width, rng)
        yield number + 1
    categories = [{"id": number + 1, "name": Path(name).stem} for number, name in enumerate(COLOUR)]
    content = {"images": rows, "annotations": objects, "categories": categories}
    (annotations / f"instances_{SPLIT}.json").write_text(json.dumps(content), encoding="utf-8")


def _dimensions(size: float) -> tuple[int, int]:
    """Height and width: from narrow (1) by usual (2) to large (3)."""
    low, high = (_NARROW, _USUAL) if size < _MIDDLE else (_USUAL, _LARGE)
    share = size - 1 if size < _MIDDLE else size - _MIDDLE
    pixels, shape = (a * (b / a) ** share for a, b in zip(low, high, strict=True))
    return max(1, round(math.sqrt(pixels / shape))), max(1, round(math.sqrt(pixels * shape)))


def _objects(image: int, first: int, height: int, width: int, rng: np.random.Generator) -> Sequence[dict[str, Any]]:
    """About seven objects, as in COCO, outlined by 8 to 40 points."""
    found = []
    for number in range(1 + int(rng.poisson(6))):
        points = int(rng.integers(8, 41))
        angles = np.linspace(0, 2 * np.pi, points, endpoint=False)
        centre = rng.uniform([0.1 * width, 0.1 * height], [0.9 * width, 0.9 * height])
        radius = rng.uniform(0.02, 0.25) * min(height, width) * rng.uniform(0.7, 1.0, points)
        outline = centre + radius[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=1)
        outline = np.clip(outline, 0, [width, height]).round(2)
        left, top = outline.min(axis=0)
        wide, high = outline.max(axis=0) - (left, top)
        found.append(
            {
                "id": first + number,
                "image_id": image,
                "category_id": 1 + int(rng.integers(len(COLOUR))),
                "bbox": [float(left), float(top), float(wide), float(high)],
                "area": float(cv2.contourArea(outline.astype(np.float32))),
                "iscrowd": 0,
                "segmentation": [outline.reshape(-1).tolist()],
            }
        )
    return found
