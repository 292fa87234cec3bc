"""Volumes on disk: NumPy files, mapped into memory, and NIfTI files, where nibabel is installed.

A case is an image and a label of the same shape (depth, height, width). Two layouts of a folder are known:

- KiTS19's: ``case_00000/imaging.nii.gz`` with ``case_00000/segmentation.nii.gz`` (uncompressed ``.nii`` too);
- NumPy: ``case_00000_x.npy`` with ``case_00000_y.npy``, as MLPerf's reference preprocesses KiTS19, each with or without
  a leading dimension of one channel.

Only ``.npy`` and uncompressed ``.nii`` files can be mapped, so that a crop costs what it holds; a ``.nii.gz`` file is
unpacked whole for every sample.
"""

from __future__ import annotations

import gzip
import importlib
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from minato_gpu import Source, read_bytes
from minato_gpu.extras import from_extra

from .files import HIDDEN, find, say_left_out

MOST_VOXELS = 1 << 30
"""A NIfTI file that claims more is refused before memory is reserved for it: a thousand million."""

_COMPRESSED = ".nii.gz"
_ENDINGS = (".nii.gz", ".nii", ".npy")
_LAYOUTS = (("imaging.nii.gz", "segmentation.nii.gz"), ("imaging.nii", "segmentation.nii"), ("_x.npy", "_y.npy"))


class CaseFolder:
    """The cases of a folder as a map-style data set; items are ``{"path": str, "label_path": str}``, sorted by name.

    Cases may lie deeper, and links are followed; names that begin with a dot are none. ``left_out`` counts those
    and other volumes, by ending; it is said once.

    Raises FileNotFoundError for a folder that is missing or has no case in either layout, and, naming it, for a case's
    image or label that is missing or is a link to what is missing.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            raise FileNotFoundError(f"there is no folder {str(root)!r}")
        self.paths: list[str] = []
        self.label_paths: list[str] = []
        paths, others = find(self.root, _ENDINGS)
        found = {Path(path) for path in paths}
        for image_end, label_end in _LAYOUTS:
            images = {file: _other(file, image_end, label_end) for file in found if _ends(file, image_end)}
            labels = {file: _other(file, label_end, image_end) for file in found if _ends(file, label_end)}
            for what, missing, pairs in (("case", "label", images), ("label", "image", labels)):
                for file, other in sorted(pairs.items()):
                    if other not in found:
                        raise FileNotFoundError(f"the {what} {str(file)!r} has no {missing} {other.name!r} beside it")
            self.paths += map(str, sorted(images))
            self.label_paths += (str(images[image]) for image in sorted(images))
            found -= images.keys() | labels.keys()
        if not self.paths:
            layouts = "case_00000/imaging.nii.gz (KiTS19) or case_00000_x.npy (NumPy)"
            raise FileNotFoundError(f"{str(root)!r} holds no volumes such as {layouts}")
        self.left_out = Counter(f"{''.join(file.suffixes)} files" for file in found)
        self.left_out[HIDDEN] = others[HIDDEN]
        say_left_out(self.root, self.left_out, "neither a case's image nor its label by their names")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"path": self.paths[index], "label_path": self.label_paths[index]}

    def source(self, index: int) -> tuple[Source, ...]:
        """What is read whole, to be read ahead. Of files that are mapped a crop reads little, which is drawn later."""
        paths = self.paths[index], self.label_paths[index]
        return tuple(Source(path) for path in paths if path.endswith(_COMPRESSED))


def _ends(file: Path, end: str) -> bool:
    """A file of KiTS19's layout is called so, of NumPy's its name ends so."""
    return file.name.endswith(end) if end.startswith("_") else file.name == end


def _other(file: Path, end: str, other: str) -> Path:
    return file.with_name(file.name.removesuffix(end) + other)


def open_volume(path: str) -> Any:
    """An array of shape (depth, height, width) that is mapped where the format allows it, and read where not."""
    if path.endswith(".npy"):
        volume: Any = np.load(path, mmap_mode="r")
    else:
        volume = _nifti(path)
    if volume.ndim == 4 and volume.shape[0] == 1:
        volume = volume[0]
    if volume.ndim != 3:
        raise ValueError(f"a volume has three dimensions, this one has the shape {volume.shape}")
    return volume


def _nifti(path: str) -> Any:
    with from_extra("pipelines"):
        nibabel = importlib.import_module("nibabel")
    if path.endswith(_COMPRESSED):
        proxy = nibabel.Nifti1Image.from_bytes(gzip.decompress(read_bytes(path).data)).dataobj
    else:
        proxy = nibabel.load(path).dataobj
    if math.prod(proxy.shape) > MOST_VOXELS:
        raise ValueError(f"the header claims a volume of the shape {proxy.shape}; {MOST_VOXELS} voxels are the most")
    # without a scale the stored numbers are the values, and an uncompressed file can stay mapped
    return proxy.get_unscaled() if (proxy.slope, proxy.inter) == (1.0, 0.0) else np.asarray(proxy)
