"""The functions behind ``pipelines.segmentation_3d``. Arrays are depth x height x width; ``xp`` is NumPy or CuPy."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np

from minato_gpu.pipeline.stages import Fields, Params
from minato_gpu.util.messages import from_extra

from .volumes import open_pair, open_volume

with from_extra("pipelines"):
    from scipy import ndimage

AXES = 3
_LARGEST = 255  # label
_ROUNDING = (
    0.1  # that a label may be off a whole number: a NIfTI file of uint8 with a scale rounds to a 510th of its largest
)


def draw_crop(rng: np.random.Generator, meta: Fields, *, oversampling: float) -> Params:
    """Draws "balanced", whether the crop is of a labelled structure, and uniform numbers that decide the rest."""
    return {"balanced": bool(rng.random() < oversampling), "where": rng.random(AXES), "which": rng.random(2)}


def crop(fields: Fields, params: Params, *, patch: tuple[int, int, int], most: float = math.inf) -> Fields:
    """Image and label of one patch; zeros where the volume is smaller.

    Balanced as MLPerf's reference does it: of a random class, one of the two connected structures with the largest
    bounding boxes; the patch contains the box, or lies within it where that is larger. Else anywhere in the volume.
    Raises ValueError, naming file and value, for labels that are not whole numbers from 0 to 255, and for values of the
    image that are beyond float32, or further than ``most`` from 0.
    """
    return crop_volumes({**fields, **open_volumes(fields)}, params, patch=patch, most=most)


def open_volumes(fields: Fields) -> Fields:
    """What of ``crop`` depends on no draw: image_volume and label_volume, as their files hold them (dtype, byte order,
    order of axes in memory), mapped where the format allows it."""
    image, label = open_pair(fields["path"], fields["label_path"])
    return {"image_volume": np.asarray(image), "label_volume": np.asarray(label)}


def crop_volumes(fields: Fields, params: Params, *, patch: tuple[int, int, int], most: float = math.inf) -> Fields:
    """As ``crop``, from what ``open_volumes`` made."""
    image, label, of = fields["image_volume"], fields["label_volume"], fields["label_path"]
    corner = None
    if params["balanced"]:
        label = classes(label, of)
        corner = _corner(label, params, patch)
    if corner is None:
        free = [max(0, size - wanted) for size, wanted in zip(image.shape, patch, strict=True)]
        corner = [int(u * (n + 1)) for u, n in zip(params["where"], free, strict=True)]
    part = numbers(_part(image, corner, patch), fields["path"], most)
    return {"image": _filled(part, patch), "label": _filled(classes(_part(label, corner, patch), of), patch)}


def classes(label: Any, path: str) -> Any:
    """Returns the labels as uint8. Floats may be 0.1 off a whole number, as a NIfTI file's scale leaves them. Raises
    ValueError, naming ``path``, for other values that uint8 does not have."""
    if label.dtype in (np.uint8, np.bool_):
        return np.asarray(label, np.uint8)
    _check_kind(label, path)
    with np.errstate(invalid="ignore"):  # what uint8 does not have
        found = label.astype(np.uint8)
        if (found == label).all():
            return found
        whole = np.rint(label)
        wrong = ~((whole >= 0) & (whole <= _LARGEST) & (np.abs(whole - label) <= _ROUNDING))
    if wrong.any():
        raise ValueError(
            f"{path!r} has the label {label[wrong][0]}; labels must be whole numbers from 0 to {_LARGEST}: write the "
            "file with such numbers in the place of its own (also for what is to be ignored)"
        )
    return whole.astype(np.uint8)


def numbers(image: Any, path: str, most: float) -> Any:
    """Returns the values as float32. Raises ValueError, naming ``path``, for values that are no real numbers, are
    beyond float32, or are further than ``most`` from 0."""
    _check_kind(image, path)
    with np.errstate(over="ignore"):
        found = np.ascontiguousarray(image, np.float32)
    if most < math.inf or (image.dtype.kind == "f" and image.dtype.itemsize > found.itemsize):
        wrong = (np.abs(found) > min(most, float(np.finfo(np.float32).max))) & np.isfinite(image)
        if wrong.any():
            which = "float32" if most == math.inf else "dtype='float16', as the pipeline can change it,"
            raise ValueError(f"{path!r} has the value {image[wrong][0]}, which {which} cannot hold: scale the image")
    return found


def _check_kind(volume: Any, path: str) -> None:
    if volume.dtype.kind not in "biuf":
        raise ValueError(f"{path!r} holds values of the type {volume.dtype}, not whole or real numbers")


def _corner(label: Any, params: Params, patch: tuple[int, int, int]) -> list[int] | None:
    """Returns where the patch begins that shows a structure of a random class; None where nothing is labelled."""
    present = np.flatnonzero(np.bincount(label.reshape(-1), minlength=2)[1:]) + 1
    if not len(present):
        return None
    one, other = (float(u) for u in params["which"])
    structures, _ = ndimage.label(label == present[int(one * len(present))])
    boxes = sorted(ndimage.find_objects(structures), key=_voxels)[-2:]
    box = boxes[int(other * len(boxes))]
    corner = []
    for side, u, wanted, size in zip(box, params["where"], patch, label.shape, strict=True):
        low, high = sorted((side.start, side.stop - wanted))
        corner.append(min(max(0, low + int(u * (high - low + 1))), max(0, size - wanted)))
    return corner


def _voxels(box: tuple[slice, ...]) -> int:
    return math.prod(side.stop - side.start for side in box)


def _part(volume: Any, corner: list[int], patch: tuple[int, int, int]) -> Any:
    return volume[tuple(slice(at, at + wanted) for at, wanted in zip(corner, patch, strict=True))]


def _filled(part: Any, patch: tuple[int, int, int]) -> Any:
    if part.shape == patch:
        return np.ascontiguousarray(part)
    whole = np.zeros(patch, part.dtype)
    whole[tuple(slice(0, n) for n in part.shape)] = part
    return whole


def cost_features(fields: Fields) -> tuple[float, ...]:
    """Voxels of the volume: finding structures goes through all of them."""
    return (float(np.prod(fields["size"].astype(np.float64))),)


def read_size(fields: Fields, params: Params) -> Fields:
    """The volume's shape, from its header."""
    return {"size": np.array(open_volume(fields["path"]).shape, np.int32)}


def draw_flip(rng: np.random.Generator, meta: Fields, *, probability: float) -> Params:
    """Draws "axes": for each, 1 with the given probability (it is reversed), else 0."""
    return {"axes": (rng.random(AXES) < probability).astype(np.int32)}


def flip(xp: ModuleType, fields: Fields, params: Params) -> Fields:
    """Image and label reversed along the drawn axes."""
    turn = tuple(slice(None, None, -1) if reverse else slice(None) for reverse in params["axes"].tolist())
    return {name: xp.ascontiguousarray(fields[name][turn]) for name in ("image", "label")}


def draw_brightness(rng: np.random.Generator, meta: Fields, *, probability: float, factor: float) -> Params:
    """Draws "gain": within 1 +- ``factor`` with the given probability, else 1."""
    applied = rng.random() < probability
    gain = rng.uniform(1 - factor, 1 + factor)
    return {"gain": float(gain) if applied else 1.0}


def brighten(xp: ModuleType, fields: Fields, params: Params) -> Fields:
    """The image times the drawn gain."""
    return {"image": fields["image"] * xp.float32(params["gain"])}


def draw_noise(
    rng: np.random.Generator, meta: Fields, *, probability: float, deviation: float, patch: tuple[int, int, int]
) -> Params:
    """Draws "noise": Gaussian, of a deviation up to ``deviation``, with the given probability; else a single 0.

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
