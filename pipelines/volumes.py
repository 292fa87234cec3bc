"""Volumes on disk: NumPy files, mapped into memory, and NIfTI files, where nibabel is installed.

A case is an image and a label of the same shape (depth, height, width). Two layouts of a folder are known:

- KiTS19's: ``case_00000/imaging.nii.gz`` with ``case_00000/segmentation.nii.gz`` (uncompressed ``.nii`` too);
- NumPy: ``case_00000_x.npy`` with ``case_00000_y.npy``, as MLPerf's reference preprocesses KiTS19, each with or without
  a leading dimension of one channel.

Only ``.npy`` and uncompressed ``.nii`` files can be mapped, so that a crop costs what it holds; a ``.nii.gz`` file is
unpacked whole for every sample.
"""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np

from minato_gpu.extras import from_extra

MOST_VOXELS = 1 << 30
"""A NIfTI file that claims more is refused before memory is reserved for it: a thousand million."""

_LAYOUTS = (
    ("*/imaging.nii.gz", "imaging.nii.gz", "segmentation.nii.gz"),
    ("*/imaging.nii", "imaging.nii", "segmentation.nii"),
    ("*_x.npy", "_x.npy", "_y.npy"),
)


class CaseFolder:
    """The cases of a folder as a map-style data set; items are ``{"path": str, "label_path": str}``, sorted by name.

    Raises FileNotFoundError for a folder that is missing, has no case in either layout, or lacks a case's label.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            raise FileNotFoundError(f"there is no folder {str(root)!r}")
        self.paths: list[str] = []
        self.label_paths: list[str] = []
        for pattern, image_end, label_end in _LAYOUTS:
            for image in sorted(self.root.glob(pattern)):
                label = image.with_name(image.name.removesuffix(image_end) + label_end)
                if not label.is_file():
                    raise FileNotFoundError(f"the case {str(image)!r} has no label {label.name!r} beside it")
                self.paths.append(str(image))
                self.label_paths.append(str(label))
        if not self.paths:
            layouts = "case_00000/imaging.nii.gz (KiTS19) or case_00000_x.npy (NumPy)"
            raise FileNotFoundError(f"{str(root)!r} holds no volumes such as {layouts}")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"path": self.paths[index], "label_path": self.label_paths[index]}


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
    proxy = nibabel.load(path).dataobj
    if math.prod(proxy.shape) > MOST_VOXELS:
        raise ValueError(f"the header claims a volume of the shape {proxy.shape}; {MOST_VOXELS} voxels are the most")
    # without a scale the stored numbers are the values, and an uncompressed file can stay mapped
    return proxy.get_unscaled() if (proxy.slope, proxy.inter) == (1.0, 0.0) else np.asarray(proxy)
