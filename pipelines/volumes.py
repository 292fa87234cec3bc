"""Volumes on disk: NumPy files, mapped into memory, and NIfTI files, where nibabel is installed.

A case is an image and a label of the same shape (depth, height, width); axes of length 1 before or behind these carry
nothing. Where NIfTI files say where they lie, both lie in the same place. Two layouts of a folder are known:

- KiTS19's: ``case_00000/imaging.nii.gz`` with ``case_00000/segmentation.nii.gz`` (uncompressed ``.nii`` too);
- NumPy: ``case_00000_x.npy`` with ``case_00000_y.npy``, as MLPerf's reference preprocesses KiTS19.

Only ``.npy`` and uncompressed ``.nii`` files can be mapped, so that a crop costs what it holds; a ``.nii.gz`` file is
unpacked whole for every sample.
"""

from __future__ import annotations

import gzip
import importlib
import math
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from minato_gpu import Source, read_bytes
from minato_gpu.util.messages import from_extra

from .files import HIDDEN, find, say_left_out

MOST_VOXELS = 1 << 30
"""A NIfTI file that claims more is refused before memory is reserved for it: a thousand million."""

MOST_APART = 0.25
"""Voxels that a label may lie beside its image: files differ in how they round their affines."""

_COMPRESSED = ".nii.gz"
_ENDINGS = (".nii.gz", ".nii", ".npy")
_LAYOUTS = (("imaging.nii.gz", "segmentation.nii.gz"), ("imaging.nii", "segmentation.nii"), ("_x.npy", "_y.npy"))


class CaseFolder:
    """The cases of a folder as a map-style data set; items are ``{"path": str, "label_path": str}``, sorted by name.

    Cases may lie deeper, and links are followed; hidden files and folders (names that begin with a dot, say) hold none.
    ``left_out`` counts those and other volumes, by ending; it is logged once.

    Raises FileNotFoundError for a folder that is missing or has no case in either layout, and, naming it, for a case's
    image or label that is missing or is a link to what is missing; ValueError for a link to a folder that it lies in.
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
        """Returns the sources of what is read whole (``.nii.gz``), to be read ahead. Of files that are mapped a crop
        reads little, which is drawn later."""
        paths = self.paths[index], self.label_paths[index]
        return tuple(Source(path) for path in paths if path.endswith(_COMPRESSED))


def _ends(file: Path, end: str) -> bool:
    """Returns whether a file is called ``end`` (KiTS19's layout) or, in NumPy's, has a name that ends so."""
    return file.name.endswith(end) if end.startswith("_") else file.name == end


def _other(file: Path, end: str, other: str) -> Path:
    return file.with_name(file.name.removesuffix(end) + other)


def open_volume(path: str) -> Any:
    """Returns an array of shape (depth, height, width), mapped where the format allows it, else read. Raises ValueError
    for another number of dimensions, and a NIfTI file that claims more than ``MOST_VOXELS``."""
    return _open(path)[0]


def open_pair(path: str, label_path: str) -> tuple[Any, Any]:
    """Returns image and label, as ``open_volume`` has them. Raises ValueError where that does, where they have not the
    same shape, and where by their files they lie more than ``MOST_APART`` voxels apart."""
    (image, place), (label, label_place) = _open(path), _open(label_path)
    if image.shape != label.shape:
        raise ValueError(f"the image has the shape {image.shape}, its label {label.shape}")
    if place is not None and label_place is not None:
        distance = _distance(place, label_place, image.shape)
        if not distance <= MOST_APART:
            raise ValueError(
                f"by their affines the label {label_path!r} lies up to {distance:.3g} voxels beside the image "
                f"{path!r}: resample it to the image, or give it the image's affine if its voxels belong to that"
            )
    return image, label


def _distance(place: Any, other: Any, shape: tuple[int, ...]) -> float:
    """Returns how many of the smallest sides of its voxels a volume's corners lie apart by two affines at most."""
    corners = np.array([*product(*((0, size - 1) for size in shape))], np.float64)
    apart = (place - other)[:3] @ np.column_stack([corners, np.ones(len(corners))]).T
    side = np.linalg.norm(place[:3, :3], axis=0).min()
    return float(np.linalg.norm(apart, axis=0).max() / max(side, np.finfo(np.float64).tiny))


def _open(path: str) -> tuple[Any, Any]:
    """The volume, and its affine, (4, 4), where its file has one."""
    volume, place = (np.load(path, mmap_mode="r"), None) if path.endswith(".npy") else _nifti(path)
    while volume.ndim > 3 and 1 in (volume.shape[0], volume.shape[-1]):
        volume = volume[..., 0] if volume.shape[-1] == 1 else volume[0]
    if volume.ndim != 3:
        raise ValueError(f"a volume has three dimensions, this one has the shape {volume.shape}")
    return volume, place


def _nifti(path: str) -> tuple[Any, Any]:
    with from_extra("pipelines"):
        nibabel = importlib.import_module("nibabel")
    if path.endswith(_COMPRESSED):
        data = gzip.decompress(read_bytes(path).data)
        is_second = nibabel.Nifti2Header.may_contain_header(data)
        file = (nibabel.Nifti2Image if is_second else nibabel.Nifti1Image).from_bytes(data)
    else:
        file = nibabel.load(path)
    proxy, header = file.dataobj, file.header
    if math.prod(proxy.shape) > MOST_VOXELS:
        raise ValueError(f"the header claims a volume of the shape {proxy.shape}; {MOST_VOXELS} voxels are the most")
    place = file.affine if header["sform_code"] or header["qform_code"] else None
    # without a scale the stored numbers are the values, and an uncompressed file can stay mapped
    return proxy.get_unscaled() if (proxy.slope, proxy.inter) == (1.0, 0.0) else np.asarray(proxy), place
