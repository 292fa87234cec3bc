"""The functions behind ``pipelines.segmentation_3d``. Arrays are depth x height x width; ``xp`` is NumPy or CuPy."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np

from minato_gpu.extras import from_extra
from minato_gpu.stages import Fields, Params

from .volumes import open_volume

with from_extra("pipelines"):
    from scipy import ndimage

AXES = 3


def draw_crop(rng: np.random.Generator, meta: Fields, *, oversampling: float) -> Params:
    """balanced: whether the crop is of a labelled structure; where, which: uniform numbers that decide the rest."""
    return {"balanced": bool(rng.random() < oversampling), "where": rng.random(AXES), "which": rng.random(2)}


def crop(fields: Fields, params: Params, *, patch: tuple[int, int, int]) -> Fields:
    """Image and label of one patch; zeros where the volume is smaller.

    Balanced as MLPerf's reference does it: of a random class, one of the two connected structures with the largest
    bounding boxes; the patch contains the box, or lies within it where that is larger. Else anywhere in the volume.
    """
    return crop_volumes(open_volumes(fields), params, patch=patch)


def open_volumes(fields: Fields) -> Fields:
    """What of ``crop`` depends on no draw: image_volume and label_volume, as their files hold them (dtype, byte order,
    order of axes in memory), mapped where the format allows it."""
    paths = {"image_volume": fields["path"], "label_volume": fields["label_path"]}
    return {name: np.asarray(open_volume(path)) for name, path in paths.items()}


def crop_volumes(fields: Fields, params: Params, *, patch: tuple[int, int, int]) -> Fields:
    """As ``crop``, from what ``open_volumes`` made."""
    image, label = fields["image_volume"], fields["label_volume"]
    if image.shape != label.shape:
        raise ValueError(f"the image has the shape {image.shape}, its label {label.shape}")
    corner = _corner(np.asarray(label, dtype=np.uint8), params, patch) if params["balanced"] else None
    if corner is None:
        free = [max(0, size - wanted) for size, wanted in zip(image.shape, patch, strict=True)]
        corner = [int(u * (n + 1)) for u, n in zip(params["where"], free, strict=True)]
    return {"image": _cut(image, corner, patch, np.float32), "label": _cut(label, corner, patch, np.uint8)}


def _corner(label: Any, params: Params, patch: tuple[int, int, int]) -> list[int] | None:
    """Where the patch begins that shows a structure of a random class; None where nothing is labelled."""
    classes = np.flatnonzero(np.bincount(label.reshape(-1), minlength=2)[1:]) + 1
    if not len(classes):
        return None
    one, other = (float(u) for u in params["which"])
    structures, _ = ndimage.label(label == classes[int(one * len(classes))])
    boxes = sorted(ndimage.find_objects(structures), key=_voxels)[-2:]
    box = boxes[int(other * len(boxes))]
    corner = []
    for side, u, wanted, size in zip(box, params["where"], patch, label.shape, strict=True):
        low, high = sorted((side.start, side.stop - wanted))
        corner.append(min(max(0, low + int(u * (high - low + 1))), max(0, size - wanted)))
    return corner


def _voxels(box: tuple[slice, ...]) -> int:
    return math.prod(side.stop - side.start for side in box)


def _cut(volume: Any, corner: list[int], patch: tuple[int, int, int], dtype: Any) -> Any:
    part = volume[tuple(slice(at, at + wanted) for at, wanted in zip(corner, patch, strict=True))]
    if part.shape == patch:
        return np.ascontiguousarray(part, dtype)
    whole = np.zeros(patch, dtype)
    whole[tuple(slice(0, n) for n in part.shape)] = part
    return whole


def cost_features(fields: Fields) -> tuple[float, ...]:
    """Voxels of the volume: finding structures goes through all of them."""
    return (float(np.prod(fields["size"].astype(np.float64))),)


def read_size(fields: Fields, params: Params) -> Fields:
    """The volume's shape, from its header."""
    return {"size": np.array(open_volume(fields["path"]).shape, np.int32)}


def draw_flip(rng: np.random.Generator, meta: Fields, *, probability: float) -> Params:
    """axes: 1 for each axis that is reversed, drawn one by one."""
    return {"axes": (rng.random(AXES) < probability).astype(np.int32)}


def flip(xp: ModuleType, fields: Fields, params: Params) -> Fields:
    """Image and label reversed along the drawn axes."""
    turn = tuple(slice(None, None, -1) if reverse else slice(None) for reverse in params["axes"].tolist())
    return {name: xp.ascontiguousarray(fields[name][turn]) for name in ("image", "label")}


def draw_brightness(rng: np.random.Generator, meta: Fields, *, probability: float, factor: float) -> Params:
    """gain: within 1 +- ``factor`` with the given probability, else 1."""
    applied = rng.random() < probability
    gain = rng.uniform(1 - factor, 1 + factor)
    return {"gain": float(gain) if applied else 1.0}


def brighten(xp: ModuleType, fields: Fields, params: Params) -> Fields:
    """The image times the drawn gain."""
    return {"image": fields["image"] * xp.float32(params["gain"])}


def draw_noise(
    rng: np.random.Generator, meta: Fields, *, probability: float, deviation: float, patch: tuple[int, int, int]
) -> Params:
    """noise: Gaussian, of a deviation up to ``deviation``, with the given probability; else a single 0.

    Drawn on the host for either lane: no two generators agree.
    """
    if rng.random() >= probability:
        return {"noise": np.zeros((1, 1, 1), np.float32)}
    scale = np.float32(rng.uniform(0, deviation))
    return {"noise": rng.standard_normal(patch, dtype=np.float32) * scale}


def add_noise(xp: ModuleType, fields: Fields, params: Params) -> Fields:
    """The image plus the drawn noise."""
    return {"image": fields["image"] + xp.asarray(params["noise"])}


def cast(fields: Fields, params: Params, *, dtype: str) -> Fields:
    """Image in ``dtype`` and label, each with a leading channel."""
    return {"image": fields["image"].astype(dtype)[None], "label": fields["label"][None]}


def cast_on_device(fields: Fields, params: Params, *, dtype: str) -> Fields:
    """As ``cast``, on tensors."""
    import torch

    return {"image": fields["image"].to(getattr(torch, dtype))[None], "label": fields["label"][None]}
