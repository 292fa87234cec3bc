"""Photographs for training a classifier: read, decode, random resized crop, random flip, normalise.

The random resized crop (Szegedy et al., "Going deeper with convolutions", CVPR 2015, section 6) is drawn as
torchvision's ``RandomResizedCrop`` draws it, and is spread over three stages: ``crop_box`` draws the box on the
host from the picture's size; ``decode`` decodes only that box where the decoder can; ``resize`` scales it.

The two implementations mean the same: bilinear without antialiasing, Exif orientation applied, greyscale turned
into RGB, chroma upsampled alike, the accurate inverse transform. On the CPU both are libjpeg-turbo.

Decisions:
- Box and decoding belong together: a decoder that knows the box decodes no further down, and nobody wants to send a
  whole decoded photograph to another lane. A cache may keep the whole one: then boxes are cut from that.
- The functions are in ``pipelines.image_stages``, module-level, so that spawned workers can have them.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from minato_gpu import Source
from minato_gpu.pipeline import DaliFragment, Field, Pipeline, Stage

from . import image_stages
from .example_photographs import write as example_data
from .files import HIDDEN, check_link, find, is_hidden, say_left_out
from .photograph_stages import GEOMETRIC, MEAN, READ, STD, decode, normalise, whole_tolerance
from .shards import TarShards

__all__ = ["MEAN", "STD", "ImageFolder", "TarShards", "build", "dataset", "example_data", "pipeline"]

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


class ImageFolder:
    """A folder of class folders of photographs (JPEG, PNG or WebP) as a data set.

    Items are ``{"path": str, "label": int}``; labels number the class folders, sorted by name, from 0. Files may
    lie deeper, and links are followed. ``left_out`` counts, by ending, the files in class folders that are none of
    these, photographs that lie in no class folder, and what is hidden (names that begin with a dot, or that systems
    leave, such as "__MACOSX"), which is no class either; what it counts is said once.

    Raises FileNotFoundError where there is no folder or no photograph, and where a link's target is missing, naming it.
    Whether a file can be decoded is found out when it is read.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            raise FileNotFoundError(f"there is no folder {str(root)!r}")
        everything = sorted(self.root.iterdir())
        entries = [entry for entry in everything if not is_hidden(entry.name)]
        for entry in entries:
            if entry.is_symlink():
                check_link(str(entry))
        folders = [entry for entry in entries if entry.is_dir()]
        self.classes = [folder.name for folder in folders]
        self.paths: list[str] = []
        self.labels: list[int] = []
        outside = sum(entry.suffix.lower() in SUFFIXES for entry in entries if not entry.is_dir())
        self.left_out = Counter({"photographs in no class folder": outside, HIDDEN: len(everything) - len(entries)})
        for label, folder in enumerate(folders):
            files, others = find(folder, SUFFIXES)
            self.left_out.update(others)
            self.paths += files
            self.labels += [label] * len(files)
        if not self.paths:
            raise FileNotFoundError(f"{str(root)!r} has no class folders with {', '.join(SUFFIXES)} files in them")
        say_left_out(self.root, self.left_out, f"photographs end in {', '.join(SUFFIXES)} and lie in class folders")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"path": self.paths[index], "label": self.labels[index]}

    def source(self, index: int) -> Source:
        """Where the photograph lies, to be read ahead."""
        return Source(self.paths[index])


def build(
    size: int = 224,
    *,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: float = 0.5,
    mean: tuple[float, float, float] = MEAN,
    std: tuple[float, float, float] = STD,
    fancy_upsampling: bool = True,
) -> Pipeline:
    """The training pipeline: ``{"path", "label"}`` (of ``ImageFolder`` or ``TarShards``) to ``{"image", "label"}``.

    image: float32 (3, ``size``, ``size``), red, green, blue, (value / 255 - ``mean``) / ``std``; label: int64.
    ``scale``: range of the crop's share of the picture's area; ``ratio``: range of its width / height; ``flip``:
    probability of mirroring left and right. ``fancy_upsampling``: chroma of a JPEG is upsampled smoothly on both lanes,
    as by Pillow and OpenCV, or (False) repeated, as by DALI, for which an H200 takes half the time. Raises
    ValueError for values that make no sense, ImportError where False needs a library that is not installed.
    """
    _check_settings(size, scale, ratio, flip, std)
    square = Field(np.uint8, (size, size, 3), layout="HWC")
    stages = (
        *_host_stages(scale, ratio),
        decode(fancy_upsampling),
        Stage(
            "resize",
            reads=("image",),
            writes={"image": square},
            cpu=partial(image_stages.resize, size=size),
            device=DaliFragment(partial(image_stages.resize_dali, size=size)),
            tolerance={"cpu": GEOMETRIC, "cuda": GEOMETRIC},
        ),
        Stage(
            "flip",
            reads=("image",),
            writes={"image": square},
            cpu=image_stages.mirror,
            device=DaliFragment(image_stages.mirror_dali),
            draw=partial(image_stages.draw_mirror, probability=flip),
        ),
        normalise(size, mean, std),
    )
    inputs = {"path": Field(object), "label": Field(np.int64)}
    return Pipeline(
        stages,
        outputs=("image", "label"),
        name="image_classification",
        inputs=inputs,
        tolerance=whole_tolerance(fancy_upsampling),
    )


pipeline, dataset = build, ImageFolder  # with their default settings: see ``minato_gpu.pipelines``


def _host_stages(scale: tuple[float, float], ratio: tuple[float, float]) -> tuple[Stage, Stage]:
    return (
        READ,
        Stage(
            "crop_box",
            reads=(),
            writes={"box": Field(np.int32, (4,))},
            cpu=image_stages.place_box,
            draw=partial(image_stages.draw_box, scale=scale, ratio=ratio),
            meta=("size",),
            features=image_stages.cost_features,
            feature_names=("encoded_bytes", "pixels", "crop_pixels", "bytes_to_crop_end", "progressive_bytes"),
        ),
    )


def _check_settings(
    size: int, scale: tuple[float, float], ratio: tuple[float, float], flip: float, std: tuple[float, float, float]
) -> None:
    if size < 1:
        raise ValueError(f"size must be at least 1 pixel, got {size}")
    if not 0 < scale[0] <= scale[1] <= 1:
        raise ValueError(f"scale must be a range of shares, 0 < low <= high <= 1, got {scale}")
    if not 0 < ratio[0] <= ratio[1]:
        raise ValueError(f"ratio must be a range, 0 < low <= high, got {ratio}")
    if not 0 <= flip <= 1:
        raise ValueError(f"flip must be a probability, got {flip}")
    if min(std) <= 0:
        raise ValueError(f"std must be > 0, got {std}")
