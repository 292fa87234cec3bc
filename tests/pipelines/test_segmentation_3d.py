"""Volumes: which patch is cut out, and what is said of files that will not do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minato_gpu.samples import StageError, stream
from pipelines import segmentation_3d, volume_stages, volumes
from pipelines.volumes import CaseFolder, open_volume

PATCH = (8, 10, 12)


@pytest.fixture
def case(tmp_path: Path) -> dict[str, Any]:
    """A volume whose voxels say where they are, with two structures of class 1, a speck of it, and one of class 3."""
    image = np.arange(30 * 40 * 50, dtype=np.float32).reshape(30, 40, 50)
    label = np.zeros(image.shape, np.uint8)
    label[2:6, 3:8, 4:9] = 1
    label[20:29, 20:39, 25:45] = 1  # larger than a patch
    label[15, 1, 1] = 1
    label[10:12, 30:33, 2:4] = 3
    np.save(tmp_path / "a_x.npy", image)
    np.save(tmp_path / "a_y.npy", label)
    return dict(CaseFolder(tmp_path)[0])


def crop(case: Any, seed: int, oversampling: float) -> tuple[Any, Any, tuple[int, ...]]:
    """Image, label and corner of the patch that this seed cuts out."""
    params = volume_stages.draw_crop(stream(seed), {}, oversampling=oversampling)
    fields = volume_stages.crop(case, params, patch=PATCH)
    corner = np.unravel_index(int(fields["image"][0, 0, 0]), (30, 40, 50))
    return fields["image"], fields["label"], tuple(int(n) for n in corner)


def test_a_patch_is_a_part_of_the_volume(case: Any) -> None:
    image, label = open_volume(case["path"]), open_volume(case["label_path"])
    for seed in range(50):
        got, mask, corner = crop(case, seed, 0.5)
        part = tuple(slice(at, at + size) for at, size in zip(corner, PATCH, strict=True))
        assert np.array_equal(got, image[part]) and np.array_equal(mask, label[part])
        assert got.dtype == np.float32 and mask.dtype == np.uint8


def test_a_volume_without_structures_is_cut_anywhere(tmp_path: Path) -> None:
    np.save(tmp_path / "a_x.npy", np.ones((9, 11, 13), np.float32))
    np.save(tmp_path / "a_y.npy", np.zeros((9, 11, 13), np.uint8))
    fields = segmentation_3d.build(PATCH, oversampling=1.0, probability=0.0).run(CaseFolder(tmp_path)[0], 3)
    assert fields["image"].shape == (1, *PATCH) and (fields["image"] == 1).all()


LABELS = np.zeros((4, 5, 6))
LABELS[1:3, 2:4, 1:5] = 3


@pytest.mark.parametrize("oversampling", [0.0, 1.0])
@pytest.mark.parametrize(
    ("labels", "value"),
    [
        (LABELS - 1e-4, None),
        (LABELS.astype(np.float32) * np.float32(0.9999), None),
        (LABELS > 0, None),
        (LABELS * 0.98823, None),  # 1 of a file of uint8 whose scale is 14 / 255
        (LABELS * 0.5, "1.5"),
        (LABELS.astype(np.int16) * 1000, "3000"),
        (LABELS.astype(np.int64) - 1, "-1"),
        (np.where(LABELS == 0, np.nan, LABELS), "nan"),
        (LABELS.astype(np.complex64), "the type complex64"),
    ],
)
def test_labels_are_those_of_the_file_or_refused(
    tmp_path: Path, labels: Any, value: str | None, oversampling: float
) -> None:
    np.save(tmp_path / "a_x.npy", np.zeros(labels.shape, np.float32))
    np.save(tmp_path / "a_y.npy", labels)
    pipeline = segmentation_3d.build(labels.shape, oversampling=oversampling, flip=0)
    if value is None:
        assert np.array_equal(pipeline.run(CaseFolder(tmp_path)[0], 0)["label"][0], np.rint(labels + 0.0))
        return
    with pytest.raises(StageError, match=rf"a_y\.npy' (has the label|holds values of) {re.escape(value)}[;,]"):
        pipeline.run(CaseFolder(tmp_path)[0], 0)


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (np.float64(1e300), "float32", r"a_x\.npy' has the value 1e\+300, which float32 cannot hold"),
        (np.uint16(65535), "float16", r"a_x\.npy' has the value 65535, which dtype='float16', as .* cannot hold"),
        (np.complex64(1), "float32", r"a_x\.npy' holds values of the type complex64"),
        (np.uint16(65535), "float32", None),
        (np.uint16(50000), "float16", None),
    ],
)
def test_images_are_those_of_the_file_or_refused(tmp_path: Path, value: Any, dtype: str, message: str | None) -> None:
    """Also where the brightness is changed."""
    np.save(tmp_path / "a_x.npy", np.full((4, 5, 6), value))
    np.save(tmp_path / "a_y.npy", np.zeros((4, 5, 6), np.uint8))
    pipeline = segmentation_3d.build((4, 5, 6), noise=0, probability=1, dtype=dtype)
    if message is None:
        assert np.isfinite(pipeline.run(CaseFolder(tmp_path)[0], 0)["image"]).all()
        return
    with pytest.raises(StageError, match=message):
        pipeline.run(CaseFolder(tmp_path)[0], 0)


def test_a_volume_that_claims_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nibabel = pytest.importorskip("nibabel")
    nibabel.save(nibabel.Nifti1Image(np.zeros((4, 5, 6), np.int16), np.eye(4)), tmp_path / "a.nii.gz")
    monkeypatch.setattr(volumes, "MOST_VOXELS", 119)
    with pytest.raises(ValueError, match=r"claims a volume of the shape \(4, 5, 6\); 119 voxels are the most"):
        open_volume(str(tmp_path / "a.nii.gz"))


MIRRORED = np.diag([-1.0, 1, 1, 1])
MIRRORED[0, 3] = 7
SHIFTED = np.eye(4)
SHIFTED[2, 3] = 1


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
@pytest.mark.parametrize(
    ("affine", "voxels"),
    [
        (np.eye(4), None),
        (np.eye(4) * (1 + 1e-5), None),
        (None, None),
        (MIRRORED, "7"),
        (SHIFTED, "1"),
        (np.diag([1, 1, 2.0, 1]), "7"),
    ],
)
def test_image_and_label_lie_in_the_same_place(tmp_path: Path, suffix: str, affine: Any, voxels: str | None) -> None:
    """Or their files do not say where they lie."""
    nibabel = pytest.importorskip("nibabel")
    for name, lies in (("imaging", np.eye(4)), ("segmentation", affine)):
        nibabel.save(nibabel.Nifti1Image(np.zeros((8, 8, 8), np.uint8), lies), tmp_path / f"{name}{suffix}")
    pipeline, sample = segmentation_3d.build((8, 8, 8)), CaseFolder(tmp_path)[0]
    if voxels is None:
        assert pipeline.run(sample, 0)["label"].shape == (1, 8, 8, 8)
        return
    said = rf"the label '.*segmentation{suffix}' lies up to {voxels} voxels beside the image '.*imaging{suffix}'"
    with pytest.raises(StageError, match=said):
        pipeline.run(sample, 0)


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path) -> None:
    np.save(tmp_path / "a_x.npy", np.zeros((2, 2, 2)))
    with pytest.raises(FileNotFoundError, match=r"has no label .a_y\.npy. beside it"):
        CaseFolder(tmp_path)
    (tmp_path / "a_x.npy").rename(tmp_path / "a_y.npy")
    with pytest.raises(FileNotFoundError, match=r"the label .*a_y\.npy. has no image .a_x\.npy. beside it"):
        CaseFolder(tmp_path)
    np.save(tmp_path / "a_x.npy", np.zeros((2, 2, 2)))
    np.save(tmp_path / "a_y.npy", np.zeros((2, 2, 3)))
    with pytest.raises(StageError, match=r"image has the shape \(2, 2, 2\), its label \(2, 2, 3\)"):
        segmentation_3d.build(PATCH).run(CaseFolder(tmp_path)[0], 0)
    np.save(tmp_path / "a_x.npy", np.zeros((2, 2)))
    with pytest.raises(StageError, match="three dimensions"):
        segmentation_3d.build(PATCH).run(CaseFolder(tmp_path)[0], 0)
