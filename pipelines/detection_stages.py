"""The functions behind ``pipelines.object_detection``, as far as they are not those of ``pipelines.image_stages``.

Points and boxes are in pixels from the upper left corner of the upright picture, column before row; the pixel in column
3 reaches from x = 3 to x = 4, and its centre is at 3.5. Sizes and shapes are (height, width).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minato_gpu.pipeline.stages import Fields, Params


def target_size(height: int, width: int, *, shorter: int, longest: int) -> tuple[int, int]:
    """The size to which a picture is scaled: its shorter side to ``shorter``, or its longer side to ``longest`` where
    it would be longer than that. Fractions of pixels are dropped, and no side vanishes.

    In whole numbers, so that no rounding of the scale takes a pixel off the side that was asked for. MLPerf's reference
    and torchvision give the same or, where ``longest`` decides, differ by a pixel.
    """
    low, high = min(height, width), max(height, width)
    if shorter * high > longest * low:
        scaled, scale = longest, high
    else:
        scaled, scale = shorter, low
    return max(1, height * scaled // scale), max(1, width * scaled // scale)


def place(fields: Fields, params: Params, *, shorter: int, longest: int) -> Fields:
    """Decides where everything goes: target shape, whether to mirror, and with it the boxes and the polygons' points.

    "box" is the whole picture, as the decoder takes it. Raises ValueError for a picture whose size is not the one that
    its annotations were made for: scaled from the wrong size, boxes would lie beside their objects.
    """
    height, width = (int(n) for n in fields["size"])
    _check_size(height, width, fields["declared"])
    shape = target_size(height, width, shorter=shorter, longest=longest)
    scale = np.array([shape[1] / width, shape[0] / height], np.float64)
    points = (fields["points"] * scale).astype(np.float32)
    boxes = (fields["boxes"] * np.tile(scale, 2)).astype(np.float32)
    if params["mirror"]:
        points[:, 0] = shape[1] - points[:, 0]
        boxes[:, [0, 2]] = shape[1] - boxes[:, [2, 0]]
    return {
        "shape": np.array(shape, np.int32),
        "mirror": params["mirror"],
        "box": np.array([0, 0, height, width], np.int32),
        "boxes": boxes,
        "points": points,
    }


def _check_size(height: int, width: int, declared: Any) -> None:
    if (height, width) == tuple(declared.tolist()):
        return
    problem = f"the picture is {width} x {height} pixels, its annotations are for {declared[1]} x {declared[0]}"
    if height != width and (width, height) == tuple(declared.tolist()):
        problem += "; boxes must refer to the picture as its Exif orientation turns it, or the file must lose that tag"
    raise ValueError(problem)


def cost_features(fields: Fields) -> tuple[float, ...]:
    """Returns the numbers that the cost depends on: coded bytes, pixels before and after, and the bytes if
    progressive."""
    encoded = float(fields["encoded"].size)
    pixels, target = (float(shape[0]) * float(shape[1]) for shape in (fields["size"], fields["shape"]))
    return encoded, pixels, target, encoded if fields["progressive"] else 0.0


def draw_masks(fields: Fields, params: Params) -> Fields:
    """A bitmap of ``shape`` for each object: 1 where the pixel's centre lies within one of its polygons, else 0.

    Raises ValueError for an object that has no polygon.
    """
    height, width = (int(n) for n in fields["shape"])
    masks = np.zeros((len(fields["boxes"]), height, width), np.uint8)
    owners, sizes = fields["rings"].T
    absent = np.setdiff1d(np.arange(len(masks)), owners)
    if len(absent):
        raise ValueError(f"object {absent[0]} has no polygon to make a bitmap of; use masks='polygons'")
    for owner, size, end in zip(owners, sizes, np.cumsum(sizes), strict=True):
        fill(masks[owner], fields["points"][end - size : end])
    return {"masks": masks}


def fill(mask: Any, ring: Any) -> None:
    """Sets the pixels of ``mask``, uint8 (h, w), whose centres the closed polygon ``ring``, (k, 2), surrounds.

    By the even-odd rule, one crossing of an edge with a row of centres at a time. OpenCV's ``fillPoly`` also fills
    what an edge touches, which makes an object ten pixels across a quarter larger than its polygon.
    """
    height, width = mask.shape
    x, y = ring.T.astype(np.float64) - 0.5  # centres are at whole numbers now
    next_x, next_y = np.roll(x, -1), np.roll(y, -1)
    # Half-open, so that a corner on a row counts for one of its two edges, and a level edge for none.
    first, end = np.clip(np.ceil([np.minimum(y, next_y), np.maximum(y, next_y)]), 0, height).astype(np.int64)
    counts = end - first
    if not counts.any():
        return
    edge = np.repeat(np.arange(len(x)), counts)
    row = np.arange(len(edge)) - np.repeat(np.cumsum(counts) - counts - first, counts)
    slope = (next_x - x)[edge] / (next_y - y)[edge]
    column = np.clip(np.ceil(x[edge] + (row - y[edge]) * slope), 0, width).astype(np.int64)
    top, left = row.min(), column.min()
    turns = np.zeros((row.max() + 1 - top, column.max() + 1 - left), np.uint8)
    np.bitwise_xor.at(turns, (row - top, column - left), 1)
    inside = np.bitwise_xor.accumulate(turns, axis=1)[:, :-1]
    mask[top : top + len(inside), left : left + inside.shape[1]] |= inside
