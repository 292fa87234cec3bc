"""The classes of ``torchvision.transforms.v2``: which run on both lanes, which on the CPU only, which are refused."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from minato_gpu.pipeline.pipeline import Tolerance
from minato_gpu.util.messages import from_extra

with from_extra("torchvision"):
    from torchvision.transforms import v2

_MOVED = Tolerance()  # pixels are moved or set, not computed
_ROUNDED = Tolerance(0.001, 0.001)
_SCALED = Tolerance(2, 0.25)
_COLOURED = Tolerance(8, 0.5)  # several steps, each rounded to whole levels
_WARPED = Tolerance(255, 0.5)  # a pixel half-way between two may be taken from either

BOTH_LANES: Mapping[str, Tolerance] = {
    "CenterCrop": _MOVED,
    "ClampBoundingBoxes": _MOVED,
    "ClampKeyPoints": _MOVED,
    "ColorJitter": _COLOURED,
    "Compose": _MOVED,
    "ConvertBoundingBoxFormat": _MOVED,
    "ConvertImageDtype": _ROUNDED,
    "ElasticTransform": _WARPED,
    "GaussianBlur": _SCALED,
    "Grayscale": _SCALED,
    "Identity": _MOVED,
    "Normalize": _ROUNDED,
    "PILToTensor": _MOVED,
    "Pad": _MOVED,
    "RGB": _MOVED,
    "RandomAdjustSharpness": _SCALED,
    "RandomAffine": _WARPED,
    "RandomAutocontrast": _SCALED,
    "RandomChannelPermutation": _MOVED,
    "RandomCrop": _MOVED,
    "RandomEqualize": _SCALED,
    "RandomErasing": _MOVED,
    "RandomGrayscale": _SCALED,
    "RandomHorizontalFlip": _MOVED,
    "RandomInvert": _MOVED,
    "RandomIoUCrop": _MOVED,
    "RandomPerspective": _WARPED,
    "RandomPhotometricDistort": _COLOURED,
    "RandomPosterize": _MOVED,
    "RandomResize": _SCALED,
    "RandomResizedCrop": _SCALED,
    "RandomRotation": _WARPED,
    "RandomShortestSize": _SCALED,
    "RandomSolarize": _MOVED,
    "RandomVerticalFlip": _MOVED,
    "RandomZoomOut": _MOVED,
    "Resize": _SCALED,
    "SanitizeBoundingBoxes": _MOVED,
    "SanitizeKeyPoints": _MOVED,
    "ScaleJitter": _SCALED,
    "SetClampingMode": _MOVED,
    "ToDtype": _ROUNDED,
    "ToImage": _MOVED,
    "ToPureTensor": _MOVED,
}
"""Classes that run on either lane, and how far the device lane may be from the CPU."""

CPU_ONLY = frozenset(
    (
        "AugMix",
        "AutoAugment",
        "FiveCrop",
        "GaussianNoise",
        "JPEG",
        "Lambda",
        "LinearTransformation",
        "RandAugment",
        "RandomApply",
        "RandomChoice",
        "RandomOrder",
        "TenCrop",
        "ToPILImage",
        "TrivialAugmentWide",
    )
)
"""Classes that are called as they are, in workers."""

_IN_COLLATE = "it mixes the samples of a batch: call it in the loader's collate_fn, and leave it out here"
REFUSED: Mapping[str, str] = {
    "CutMix": _IN_COLLATE,
    "MixUp": _IN_COLLATE,
    "ToTensor": (
        "it leaves pictures that are tensors as they are: put v2.ToImage(), v2.ToDtype(torch.float32, scale=True) in "
        "its place"
    ),
    "UniformTemporalSubsample": "it is for videos, which no pipeline here reads",
}
"""Classes that no pipeline can have, and why, or what to do."""

NOTHING_TO_DO = frozenset(
    (
        "ClampBoundingBoxes",
        "ClampKeyPoints",
        "ConvertBoundingBoxFormat",
        "Identity",
        "PILToTensor",
        "SanitizeBoundingBoxes",
        "SanitizeKeyPoints",
        "SetClampingMode",
        "ToImage",
        "ToPureTensor",
    )
)
"""Those without a stage: they leave a picture that is a tensor as it is."""

TO_SIZE = frozenset(("CenterCrop", "RandomCrop", "RandomResizedCrop"))
"""Those that cut, and whose result has their own ``size``."""

RESIZING = TO_SIZE | {
    "Pad",
    "RandomIoUCrop",
    "RandomResize",
    "RandomRotation",
    "RandomShortestSize",
    "RandomZoomOut",
    "Resize",
    "ScaleJitter",
}
"""Those that may change the picture's size."""

KEEPING = frozenset(
    ("AugMix", "AutoAugment", "GaussianNoise", "JPEG", "LinearTransformation", "RandAugment", "TrivialAugmentWide")
)
"""Of ``CPU_ONLY``: those that leave the picture's shape and dtype as they are."""

STEEP = frozenset(("RandomAutocontrast", "RandomEqualize", "RandomPosterize", "RandomSolarize"))
"""Those behind which a level more or less may be many; of a whole pipeline with one, ``ANY_DEVIATION`` is allowed."""

ANY_DEVIATION = Tolerance(255, 16)


def transforms_of(transform: Any) -> list[Any]:
    """Returns the transforms of nested ``Compose`` objects, in order; for those that work in place, copies that do not.
    Raises TypeError or ValueError for what is refused."""
    kind = type(transform)
    if kind is v2.Compose or kind is torch.nn.Sequential:
        inside = transform.transforms if kind is v2.Compose else transform
        return [one for each in inside for one in transforms_of(each)]
    if not callable(transform) or isinstance(transform, type):
        raise TypeError(f"a transform must be callable, such as v2.Compose([...]), got {transform!r}")
    if kind.__module__.startswith("torchvision.transforms.") and not class_name(transform):
        raise ValueError(
            f"{kind.__name__} is of torchvision's first version of transforms: take the class of that name from "
            "torchvision.transforms.v2, and v2.ToImage(), v2.ToDtype(torch.float32, scale=True) for ToTensor(). Or "
            "give the data set to the loader as it is, without a pipeline"
        )
    name = class_name(transform)
    if name in REFUSED:
        raise ValueError(f"v2.{name} cannot be in a pipeline: {REFUSED[name]}")
    if _interpolation(transform) in ("box", "hamming", "4", "5"):
        raise ValueError(f"v2.{name}: interpolation {transform.interpolation!r} is for Pillow's images alone")
    if getattr(transform, "inplace", False):  # nothing else may see it
        transform = copy.copy(transform)
        transform.inplace = False
    return [transform]


def class_name(transform: Any) -> str:
    """Returns the name of the transform's class in v2; "" for other classes, also those derived from one of v2."""
    kind = type(transform)
    return kind.__name__ if kind.__module__.startswith("torchvision.transforms.v2.") else ""


def on_cpu_only(transform: Any) -> bool:
    """Returns whether the transform is called on the CPU as it is."""
    return _interpolation(transform) in ("lanczos", "1") or class_name(transform) not in BOTH_LANES


def _interpolation(transform: Any) -> str:
    """Returns the name of the transform's interpolation, or Pillow's number for it."""
    given = getattr(transform, "interpolation", "")
    return str(getattr(given, "value", given))
