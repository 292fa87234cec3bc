"""Photographs for training a classifier: read, decode, random resized crop, random flip, normalise.

The random resized crop (Szegedy et al., "Going deeper with convolutions", CVPR 2015, section 6) is drawn as
torchvision's ``RandomResizedCrop`` draws it, and is spread over three stages: ``crop_box`` draws the box on the
host from the picture's size; ``decode`` decodes only that box where the decoder can; ``resize`` scales it.

The two implementations mean the same: bilinear without antialiasing, Exif orientation applied, greyscale turned
into RGB, chroma upsampled alike, the accurate inverse transform. On the CPU both are libjpeg-turbo.

Decisions:
- Box and decoding belong together: a decoder that knows the box decodes no further down, and nobody wants to send a
  whole decoded photograph to another lane. A cache may keep the whole one: then boxes are cut from that.
- The stages are those of ``pipelines.photograph_stages``, of which pipelines of one's own can be made, too.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from minato_gpu import Source
from minato_gpu.pipeline.pipeline import Field, Pipeline

from . import photograph_stages as photographs
from .example_photographs import write as example_data
from .files import HIDDEN, check_link, find, is_hidden, say_left_out
from .photograph_stages import MEAN, STD
from .shards import TarShards

__all__ = ["MEAN", "STD", "ImageFolder", "TarShards", "build", "dataset", "example_data", "pipeline"]

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


class ImageFolder:
    """A folder of class folders of photographs (JPEG, PNG or WebP) as a data set.

    Items are ``{"path": str, "label": int}``; labels number the class folders, sorted by name, from 0. Files may
    lie deeper, and links are followed. ``left_out`` counts, by ending, the files in class folders that are none of
    these, photographs that lie in no class folder, and what is hidden (names that begin with a dot, or that systems
    leave, such as "__MACOSX"); hidden folders are no classes. What it counts is logged once.

    Raises FileNotFoundError where there is no folder or no photograph, and where a link's target is missing, naming it;
    ValueError for a link to a folder that it lies in. Whether a file can be decoded is found out when it is read.
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
        """Returns the source of the photograph, to be read ahead."""
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
    stages = (
        photographs.READ,
        photographs.random_resized_crop(scale, ratio),
        photographs.decode(fancy_upsampling),
        photographs.resize(size),
        photographs.flip(size, flip),
        photographs.normalise(size, mean, std),
    )
    inputs = {"path": Field(object), "label": Field(np.int64)}
    return Pipeline(
        stages,
        outputs=("image", "label"),
        name="image_classification",
        inputs=inputs,
        tolerance=photographs.whole_tolerance(fancy_upsampling),
    )


pipeline, dataset = build, ImageFolder  # with their default settings: see ``minato_gpu.pipelines``
