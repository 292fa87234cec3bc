"""Volumes with labels in KiTS19's layout: compressed NIfTI, from a scan that the nibabel package ships.

A compressed file is unpacked whole, so what a sample costs follows its voxels, as in the paper (correlation 0.92); the
two fifths of the crops that are placed on a structure also look through the whole label. Times are about a twentieth of
KiTS19's.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data.published import SPREADS, Array, Curve, costs, sizes_of_mixture
from minato_gpu import Pipeline
from minato_gpu.util.messages import from_extra
from pipelines import segmentation_3d

with from_extra("bench"):
    from scipy import ndimage

PATCH = (64, 64, 64)
BALANCED = 0.4
_MEDIAN_VOXELS = 5e5
_PROBES = np.geomspace(5e3, 4e6, 8)


def pipeline() -> Pipeline:
    """The pipeline with patches that fit volumes of this size."""
    return segmentation_3d.build(PATCH, oversampling=BALANCED)


def write(directory: Path, count: int) -> Iterator[int]:
    """Write ``count`` cases; yields how many are done."""
    relative = SPREADS["segmentation_3d"].relative(count)
    curves = _curves()
    middle = sum(share * float(curve.seconds(np.array([_MEDIAN_VOXELS]))[0]) for share, curve in curves)
    sizes = sizes_of_mixture(middle * relative, curves)
    yield from _write(directory, np.random.default_rng(0).permutation(sizes))


def _curves() -> list[tuple[float, Curve]]:
    """Seconds by voxels for crops anywhere and for balanced ones."""
    with tempfile.TemporaryDirectory() as scratch:
        for _ in _write(Path(scratch), _PROBES):
            pass
        dataset = segmentation_3d.dataset(scratch)
        found = []
        for balanced, share in ((0.0, 1 - BALANCED), (1.0, BALANCED)):
            only = segmentation_3d.build(PATCH, oversampling=balanced)
            seconds = costs(dataset, only, range(len(dataset)))
            found.append((share, Curve(_PROBES.tolist(), seconds.tolist())))
    return found


def _write(directory: Path, sizes: Array) -> Iterator[int]:
    for number, voxels in enumerate(sizes.tolist()):
        folder = directory / f"case_{number:05}"
        folder.mkdir(parents=True, exist_ok=True)
        image, label = _volume(voxels, np.random.default_rng([0, number]))
        for name, array in (("imaging", image), ("segmentation", label)):
            _nibabel().save(_nifti(array), folder / f"{name}.nii.gz")
        yield number + 1


def _volume(voxels: float, rng: np.random.Generator) -> tuple[Any, Any]:
    """Image float32, mean 0 and deviation 1, and label uint8 (0; 1 and 2 where it is bright): the scan, resized."""
    scan = _scan()
    scale = (voxels / scan.size) ** (1 / 3) * rng.uniform(0.9, 1.1, 3)
    scale *= (voxels / (scan.size * float(np.prod(scale)))) ** (1 / 3)
    image = ndimage.zoom(scan, scale, order=1)
    label = (image > 1.0).astype(np.uint8) + (image > 2.0).astype(np.uint8)
    image += rng.standard_normal(image.shape, dtype=np.float32) * np.float32(0.1)
    return image, label


def _nibabel() -> Any:
    """Who writes no volumes does without it."""
    with from_extra("bench"):
        return importlib.import_module("nibabel")


def _nifti(array: Any) -> Any:
    make: Any = _nibabel().Nifti1Image
    return make(array, np.eye(4))


@cache
def _scan() -> Any:
    """A scan of a head: float32 (24, 96, 128), mean 0 and deviation 1."""
    with resources.as_file(resources.files(_nibabel()) / "tests" / "data" / "example4d.nii.gz") as path:
        loaded: Any = _nibabel().load(path)
        scan = np.asarray(loaded.dataobj)[..., 0].T.astype(np.float32)
    return (scan - scan.mean()) / scan.std()
