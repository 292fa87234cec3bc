"""Volumes for training a segmentation network: balanced random crop, flip, brightness, Gaussian noise, cast.

The steps and their settings are those of MLPerf Training's 3D U-Net on KiTS19 (mlcommons/training,
image_segmentation/pytorch/data_loading/pytorch_loader.py): patches of 128 x 128 x 128, of which 40 % are placed on a
labelled structure. One is not: the reference multiplies by 1 + (1 +- 0.3) to vary the brightness, here it is 1 +- 0.3.

Decisions:
- The crop stays on the CPU: it reads a few megabytes of a volume of up to hundreds, mapped into memory where the format
  allows it, and sending whole volumes to a device would cost more than it saves.
- A cache may keep the opened volumes, though their crop is drawn: a ``.nii.gz`` file is unpacked once then.
- Noise is drawn on the host, whichever lane adds it.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from minato_gpu.pipeline.pipeline import CupyFunction, Field, Keepable, Pipeline, Stage, Tolerance, TorchFunction

from . import volume_stages
from .example_volumes import write as example_data
from .volumes import CaseFolder

__all__ = ["CaseFolder", "build", "dataset", "example_data", "pipeline"]

_LEVEL = 1 / 255  # images are normalised: about one unit is their whole range
_MOST_HALF = float(np.finfo(np.float16).max)
_DEVIATIONS = 8  # that noise is off its mean at most: once in 10^15 numbers

_ROUNDING = {"cpu": Tolerance(0.001, 0.001), "cuda": Tolerance(0.01, 0.001)}

# one implementation for both lanes
_FLIP = CupyFunction(volume_stages.flip)
_BRIGHTEN = CupyFunction(volume_stages.brighten)
_ADD_NOISE = CupyFunction(volume_stages.add_noise)


def build(
    patch: tuple[int, int, int] = (128, 128, 128),
    *,
    oversampling: float = 0.4,
    flip: float = 1 / 3,
    brightness: float = 0.3,
    noise: float = 0.1,
    probability: float = 0.1,
    dtype: str = "float32",
) -> Pipeline:
    """The training pipeline: ``{"path", "label_path"}`` to ``{"image", "label"}``.

    image: ``dtype`` (1, *patch), label: uint8 (1, *patch). ``oversampling``: share of crops around a structure;
    ``flip``: probability for each axis; ``brightness``: largest relative change; ``noise``: largest standard deviation;
    these two are applied with ``probability`` each. Raises ValueError for values that make no sense.
    """
    _check(patch, oversampling, flip, brightness, noise, probability, dtype)
    most = math.inf if dtype == "float32" else (_MOST_HALF - _DEVIATIONS * noise) / (1 + brightness)
    image = Field(np.float32, patch, level=_LEVEL)
    label = Field(np.uint8, patch)
    stages = (
        Stage(
            "open",
            reads=("path",),
            writes={"size": Field(np.int32, (3,))},
            cpu=volume_stages.read_size,
        ),
        Stage(
            "crop",
            reads=("path", "label_path"),
            writes={"image": image, "label": label},
            cpu=partial(volume_stages.crop, patch=patch, most=most),
            draw=partial(volume_stages.draw_crop, oversampling=oversampling),
            features=volume_stages.cost_features,
            feature_names=("voxels",),
            keep=Keepable(
                reads=("path", "label_path"),
                writes={"image_volume": Field(object), "label_volume": Field(object)},
                make=volume_stages.open_volumes,
                cpu=partial(volume_stages.crop_volumes, patch=patch, most=most),
            ),
        ),
        Stage(
            "flip",
            reads=("image", "label"),
            writes={"image": image, "label": label},
            cpu=_FLIP.on_cpu,
            device=_FLIP,
            draw=partial(volume_stages.draw_flip, probability=flip),
        ),
        Stage(
            "brightness",
            reads=("image",),
            writes={"image": image},
            cpu=_BRIGHTEN.on_cpu,
            device=_BRIGHTEN,
            draw=partial(volume_stages.draw_brightness, probability=probability, factor=brightness),
            tolerance=_ROUNDING,
        ),
        Stage(
            "noise",
            reads=("image",),
            writes={"image": image},
            cpu=_ADD_NOISE.on_cpu,
            device=_ADD_NOISE,
            draw=partial(volume_stages.draw_noise, probability=probability, deviation=noise, patch=patch),
            tolerance=_ROUNDING,
        ),
        Stage(
            "cast",
            reads=("image", "label"),
            writes={"image": Field(dtype, (1, *patch), level=_LEVEL), "label": Field(np.uint8, (1, *patch))},
            cpu=partial(volume_stages.cast, dtype=dtype),
            device=TorchFunction(partial(volume_stages.cast_on_device, dtype=dtype)),
        ),
    )
    inputs = {"path": Field(object), "label_path": Field(object)}
    return Pipeline(stages, outputs=("image", "label"), name="segmentation_3d", inputs=inputs)


pipeline, dataset = build, CaseFolder  # with their default settings: see ``minato_gpu.pipelines``


def _check(
    patch: tuple[int, int, int],
    oversampling: float,
    flip: float,
    brightness: float,
    noise: float,
    probability: float,
    dtype: str,
) -> None:
    if len(patch) != volume_stages.AXES or min(patch) < 1:
        raise ValueError(f"patch must be three sizes of at least 1 voxel, got {patch}")
    for name, value in (("oversampling", oversampling), ("flip", flip), ("probability", probability)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be a probability, got {value}")
    if not 0 <= brightness < 1 or noise < 0:
        raise ValueError(f"brightness must be in [0, 1) and noise at least 0, got {brightness} and {noise}")
    if dtype not in ("float32", "float16"):
        raise ValueError(f"dtype must be 'float32' or 'float16', got {dtype!r}")
