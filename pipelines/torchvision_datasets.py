"""torchvision's data sets: ``minato_gpu.from_torchvision(dataset)``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Subset

from minato_gpu import Source
from minato_gpu.pipeline.pipeline import Field, Pipeline
from minato_gpu.samples import Value
from minato_gpu.util.messages import from_extra, say_once

from .files import find
from .image_classification import SUFFIXES
from .torchvision_compose import build

with from_extra("torchvision"):
    from torchvision.datasets import DatasetFolder
    from torchvision.datasets.folder import default_loader, pil_loader
    from torchvision.datasets.vision import StandardTransform
    from torchvision.transforms import v2


class Files:
    """The files of a ``DatasetFolder``, to be decoded by the pipeline: ``{"path": str, "target": ...}``."""

    def __init__(self, dataset: Any) -> None:
        self.samples: list[tuple[str, Value]] = dataset.samples
        self.target_transform = dataset.target_transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Value]:
        path, target = self.samples[index]
        return {"path": path, "target": target if self.target_transform is None else self.target_transform(target)}

    def source(self, index: int) -> Source:
        """Returns the source of the photograph, to be read ahead."""
        return Source(self.samples[index][0])


class Pictures:
    """A data set of pictures, or of pairs of a picture and a target, without its transform: ``{"image", "target"}``."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> dict[str, Value]:
        sample = self.dataset[index]
        return dict(zip(("image", "target"), sample, strict=True)) if isinstance(sample, tuple) else {"image": sample}


def from_torchvision(dataset: Any) -> tuple[Any, Pipeline]:
    """Returns a data set and a pipeline that together give what ``dataset`` gives, as "image" and, if any, "target".

    The pipeline decodes the files of an ``ImageFolder`` (JPEG, PNG and WebP, upright as Exif says), unless it was
    given a ``loader``, whose pictures are then taken.

    Args:
        dataset: any of ``torchvision.datasets``, or one of your own, that has a v2 transform in its attribute
            ``transform``, or ``transforms`` where that gets the target, too; or a ``Subset`` of one. It is not changed.

    Raises:
        TypeError, ValueError: the transform is missing or refused, or the first sample is neither a picture nor a pair
            of a picture and a target. They say what to do.
    """
    if isinstance(dataset, Subset):
        data, pipeline = from_torchvision(dataset.dataset)
        return Subset(data, dataset.indices), pipeline
    transform, joint = getattr(dataset, "transform", None), getattr(dataset, "transforms", None)
    if transform is not None or isinstance(joint, StandardTransform):
        joint = None
    if transform is None and joint is None:
        raise ValueError(
            f"the {type(dataset).__name__} has no transform: give it one, such as transform=v2.Compose([...]), or give "
            "it to the loader as it is"
        )
    if joint is None and _is_of_files(dataset):
        target = Field(np.int64) if dataset.target_transform is None else Field(object)
        return Files(dataset), build(transform, others={"target": target})
    pictures = Pictures(_bare(dataset))
    image, names = _first(pictures)
    if joint is not None:
        return pictures, build(joint, picture=image, targets=names, others={})
    return pictures, build(transform, picture=image, others=dict.fromkeys(names, Field(object)))


def to_check(found: Any, folder: str | Path | None = None) -> tuple[Pipeline, Any]:
    """The pipeline and the samples on which ``minato-gpu check`` compares the lanes.

    ``found``: a data set, or a transform, which is tried on the pictures in ``folder``. Raises ValueError where
    ``folder`` is missing, holds no picture, or is not wanted.
    """
    if not callable(found):
        if folder is not None:
            raise ValueError("a data set brings its own pictures: leave --data out")
        samples, pipeline = from_torchvision(found)
        return pipeline, samples
    if folder is None:
        raise ValueError("a transform needs pictures to be tried on: name a folder of them by --data")
    paths, _ = find(folder, SUFFIXES)
    if not paths:
        raise ValueError(f"there is no {', '.join(SUFFIXES)} file in {str(folder)!r}")
    return build(found, others={}), [{"path": path} for path in paths]


def _is_of_files(dataset: Any) -> bool:
    """Returns whether nothing is lost if the files are decoded here."""
    if not isinstance(dataset, DatasetFolder) or dataset.loader not in (default_loader, pil_loader):
        return False
    if type(dataset).__getitem__ is not DatasetFolder.__getitem__:
        return False
    other = sorted({path for path, _ in dataset.samples if not path.lower().endswith(SUFFIXES)})
    if other:
        say_once(f"{other[0]!r} is no JPEG, PNG or WebP file: all pictures are decoded by the data set's own loader")
    return not other


def _bare(dataset: Any) -> Any:
    """A copy whose pictures are not transformed; its ``target_transform`` stays."""
    bare = copy.copy(dataset)
    of_target = getattr(dataset, "target_transform", None)
    if getattr(dataset, "transforms", None) is not None:
        bare.transforms = _untouched if of_target is None else StandardTransform(None, of_target)
    if getattr(dataset, "transform", None) is not None:
        bare.transform = _untouched
    return bare


def _untouched(*sample: Value) -> Value:
    return sample if len(sample) > 1 else sample[0]


def _first(pictures: Pictures) -> tuple[Field, tuple[str, ...]]:
    """Returns the field of the first picture as a tensor, with any height and width, and the names of what comes with
    it. Raises TypeError where the sample has no picture, or more than a target with it."""
    try:
        fields = pictures[0]
        image = v2.functional.to_image(fields["image"]).numpy()
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"the {type(pictures.dataset).__name__} must return a picture (a Pillow image, an array or a tensor), or a "
            f"tuple of one and a target: {error}. Of another one return a mapping, and take Pipeline.from_torchvision"
        ) from error
    return Field(image.dtype, (image.shape[0], None, None)), tuple(name for name in fields if name != "image")
