"""Photographs for training a detector: read, place, decode, resize, flip, normalise; and how to make a batch of them.

The steps and their settings are those of Mask R-CNN (He et al., ICCV 2017, section 3.1: the shorter side to 800 pixels)
as MLPerf Training's maskrcnn reference has them (the longer side to 1333 at most, mirrored half of the time), on COCO
(Lin et al., "Microsoft COCO: Common objects in context", ECCV 2014). Pixels are brought to mean 0 and deviation 1 of
ImageNet, as torchvision does; the reference only subtracts a mean, blue first.

Pictures differ in size and objects in number, so samples cannot be stacked: give ``pad_batch`` to the loader.

    data = CocoDetection.in_folder("coco", "train2017")
    DataLoader(data, 4, shuffle=True, pipeline=build(), collate_fn=pad_batch, num_workers=8)

Decisions:
- ``place`` draws the mirroring, not ``flip``: boxes and polygons must know it, and they stay on the host. They are some
  hundred numbers; a device would take longer to start on them.
- Boxes refer to the upright picture: a file's Exif orientation is applied before anything else, on both lanes. A
  picture whose upright size is not the declared one is an error of that sample. (A tag that only mirrors, or turns by
  180 degrees, leaves the size as it is; whether the boxes were drawn after that nobody can tell.)
- Polygons by default: bitmaps of all objects take more memory than the picture, and references make them of the region
  of interest only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from minato_gpu import shared_empty
from minato_gpu.pipeline.pipeline import DaliFragment, Field, Pipeline, Stage

from . import detection_stages, image_stages
from .coco import CocoDetection
from .example_detections import write as example_data
from .photograph_stages import GEOMETRIC, MEAN, READ, STD, decode, normalise, whole_tolerance

__all__ = ["CocoDetection", "build", "dataset", "example_data", "pad_batch", "pipeline"]

MASKS = ("polygons", "bitmaps")

_SHAPE = Field(np.int32, (2,))
_BOXES = Field(np.float32, (None, 4))
_POINTS = Field(np.float32, (None, 2))
_INPUTS = {
    "path": Field(object),
    "image_id": Field(np.int64),
    "declared": _SHAPE,
    "boxes": _BOXES,
    "labels": Field(np.int64, (None,)),
    "points": _POINTS,
    "rings": Field(np.int32, (None, 2)),
}


def build(
    shorter: int = 800,
    longest: int = 1333,
    *,
    flip: float = 0.5,
    masks: str = "polygons",
    mean: tuple[float, float, float] = MEAN,
    std: tuple[float, float, float] = STD,
    fancy_upsampling: bool = True,
) -> Pipeline:
    """The training pipeline, from ``CocoDetection``'s items to image, boxes, labels, image_id, shape and masks.

    image: float32 (3, h, w), red, green, blue, (value / 255 - ``mean``) / ``std``; shape: int32 (2,), h and w: the
    shorter of them is ``shorter``, unless the longer would exceed ``longest``. boxes, points and rings are as in
    ``CocoDetection``, in the pixels of this image, mirrored with it, with the probability ``flip``.
    ``masks``: "polygons" for points and rings, or "bitmaps" for masks, uint8 (n, h, w), instead, drawn on the host.
    ``fancy_upsampling``: see ``image_classification.build``. Raises ValueError for values that make no sense.
    """
    _check_settings(shorter, longest, flip, masks)
    stages = (
        *_host_stages(shorter, longest, flip, masks),
        *_device_stages(Field(np.uint8, (None, None, 3), (longest, longest, 3), "HWC"), mean, std, fancy_upsampling),
    )
    drawn = ("points", "rings") if masks == "polygons" else ("masks",)
    return Pipeline(
        stages,
        outputs=("image", "boxes", "labels", "image_id", "shape", *drawn),
        name="object_detection",
        inputs=_INPUTS,
        tolerance=whole_tolerance(fancy_upsampling),
    )


pipeline, dataset = build, CocoDetection.in_folder  # with their default settings: see ``minato_gpu.pipelines``


def _host_stages(shorter: int, longest: int, flip: float, masks: str) -> tuple[Stage, ...]:
    place = Stage(
        "place",
        reads=("size", "declared", "boxes", "points"),
        writes={
            "shape": _SHAPE,
            "mirror": Field(np.int32),
            "box": Field(np.int32, (4,)),
            "boxes": _BOXES,
            "points": _POINTS,
        },
        cpu=partial(detection_stages.place, shorter=shorter, longest=longest),
        draw=partial(image_stages.draw_mirror, probability=flip),
        features=detection_stages.cost_features,
        feature_names=("encoded_bytes", "pixels", "target_pixels", "progressive_bytes"),
    )
    if masks == "polygons":
        return READ, place
    rasterise = Stage(
        "rasterise",
        reads=("shape", "boxes", "points", "rings"),
        writes={"masks": Field(np.uint8, (None, None, None))},
        cpu=detection_stages.draw_masks,
    )
    return READ, place, rasterise


def _device_stages(
    resized: Field, mean: tuple[float, float, float], std: tuple[float, float, float], fancy_upsampling: bool
) -> tuple[Stage, ...]:
    return (
        decode(fancy_upsampling),
        Stage(
            "resize",
            reads=("image", "shape"),
            writes={"image": resized},
            cpu=image_stages.resize,
            device=DaliFragment(image_stages.resize_dali, host_reads=("shape",)),
            tolerance={"cpu": GEOMETRIC, "cuda": GEOMETRIC},
        ),
        Stage(
            "flip",
            reads=("image", "mirror"),
            writes={"image": resized},
            cpu=partial(image_stages.mirror, drawn=False),
            device=DaliFragment(partial(image_stages.mirror_dali, drawn=False), host_reads=("mirror",)),
        ),
        normalise(None, mean, std),
    )


def pad_batch(samples: Sequence[dict[str, Any]], *, divisor: int = 32) -> dict[str, Any]:
    """A batch of samples of this pipeline, as a ``collate_fn``.

    image: float32 (n, 3, H, W), each picture in the upper left corner and zeros (the mean colour) beside it; H and W
    are the largest height and width of the batch, rounded up to a multiple of ``divisor`` (of a backbone's strides).
    shape: int64 (n, 2), what each picture takes of it; image_id: int64 (n,). Every other field: a list of n tensors.
    """
    if divisor < 1:
        raise ValueError(f"divisor must be at least 1 pixel, got {divisor}")
    images = [np.asarray(sample["image"]) for sample in samples]
    height, width = (-(-max(image.shape[axis] for image in images) // divisor) * divisor for axis in (1, 2))
    padded = shared_empty((len(images), 3, height, width))
    for target, image in zip(padded.numpy(), images, strict=True):
        _, rows, columns = image.shape
        target[:, :rows, :columns] = image
        target[:, rows:] = 0
        target[:, :rows, columns:] = 0
    # Copies: the samples lie in memory that is given back when their batch is made.
    batch: dict[str, Any] = {
        name: padded if name == "image" else [torch.tensor(np.asarray(sample[name])) for sample in samples]
        for name in samples[0]
    }
    batch["shape"] = torch.tensor([image.shape[1:] for image in images])
    batch["image_id"] = torch.tensor([int(sample["image_id"]) for sample in samples])
    return batch


def _check_settings(shorter: int, longest: int, flip: float, masks: str) -> None:
    if not 1 <= shorter <= longest:
        raise ValueError(f"shorter must be at least 1 pixel and at most longest, got {shorter} and {longest}")
    if not 0 <= flip <= 1:
        raise ValueError(f"flip must be a probability, got {flip}")
    if masks not in MASKS:
        raise ValueError(f"masks must be one of {', '.join(map(repr, MASKS))}, got {masks!r}")
