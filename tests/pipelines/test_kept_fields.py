"""The four pipelines: both lanes mean the same, and samples made of what a cache may keep are the same, bit for bit."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minato_gpu.lab import parity
from minato_gpu.memory import blobs
from minato_gpu.pipeline.kept_fields import KeepableFields
from minato_gpu.pipeline.pipeline import Pipeline
from pipelines import image_classification, object_detection, segmentation_3d, speech_recognition
from pipelines.example_volumes import volume
from pipelines.speech_recognition import Steps

Fields = Mapping[str, Any]
PATCH = (16, 32, 24)
KEPT: dict[str, tuple[Pipeline, set[str]]] = {
    "image_classification": (image_classification.build(size=64), {"size", "picture"}),
    "object_detection": (object_detection.build(160, 240, masks="bitmaps"), {"size", "picture"}),
    "segmentation_3d": (segmentation_3d.build(PATCH, probability=0.5), {"image_volume", "label_volume"}),
    "segmentation_3d, float16": (
        segmentation_3d.build(PATCH, probability=0.5, dtype="float16"),
        {"image_volume", "label_volume"},
    ),
    "speech_recognition": (speech_recognition.build(), {"audio", "rate"}),
    "speech_recognition, one speed": (
        speech_recognition.build(speeds=(1.1,), steps=Steps(3, 9, every=2)),
        {"features"},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


def samples(name: str, folder: Path) -> list[dict[str, Any]]:
    """The example data of this pipeline; arrays are read-only."""
    module, folder = importlib.import_module(f"pipelines.{name.partition(',')[0]}"), folder / name.partition(",")[0]
    if not folder.exists():
        module.example_data(folder)
    data = module.dataset(folder)
    return [frozen(data[number]) for number in range(len(data))]


def frozen(fields: Fields) -> dict[str, Any]:
    for value in fields.values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    return dict(fields)


def bits(fields: Fields) -> dict[str, Any]:
    arrays = {name: np.asarray(value) for name, value in fields.items()}
    return {name: (array.dtype.str, array.shape, array.tobytes()) for name, array in arrays.items()}


def no_stage(_: int) -> None:
    """Nobody is told."""


def check(pipeline: Pipeline, fields: Fields, *, seeds: int = 3) -> dict[str, Any]:
    """Samples made with kept fields are those made without; returns these, by name."""
    keepable = KeepableFields(pipeline)
    given = keepable.given(fields)
    assert given is not None
    made = keepable.make(fields, 0, no_stage)
    assert bits(made.outputs) == bits(pipeline.run(fields, 0))
    assert made.kept is not None
    buffers = blobs.pieces(blobs.dump((given, made.kept)))
    belongs_to, kept = blobs.load(np.frombuffer(b"".join(buffers), np.uint8))  # read-only
    assert belongs_to == given
    for seed in range(seeds):
        assert bits(keepable.run(fields, kept, seed, no_stage)) == bits(pipeline.run(fields, seed))
    return {name: value for fields in kept.values() for name, value in fields.items()}


@pytest.mark.parametrize("name", KEPT)
def test_both_lanes_mean_the_same(name: str, folder: Path) -> None:
    compared = parity.check(KEPT[name][0], samples(name, folder))
    assert all(one.passed for one in compared), compared


@pytest.mark.parametrize("name", KEPT)
def test_samples_of_kept_fields_are_the_same(name: str, folder: Path) -> None:
    pipeline, names = KEPT[name]
    for fields in samples(name, folder):
        assert check(pipeline, fields).keys() == names


@pytest.mark.parametrize("name", KEPT)
def test_no_stage_writes_into_what_it_reads(name: str, folder: Path) -> None:
    pipeline, _ = KEPT[name]
    for fields in samples(name, folder)[:4]:
        known = dict(fields)
        for number in range(len(pipeline.stages)):
            known.update(frozen(pipeline.run_stage(number, known, 5)))
        assert bits({each: known[each] for each in pipeline.outputs}) == bits(pipeline.run(fields, 5))


@pytest.mark.parametrize("dtypes", [("<f4", "|u1"), (">f4", ">i2"), ("<i2", "<i4"), (">f8", "<f4")], ids=str)
@pytest.mark.parametrize("kind", ["npy", "nii", "nii.gz", "scaled.nii.gz"])
def test_volumes_of_any_type_and_byte_order(kind: str, dtypes: tuple[str, str], tmp_path: Path) -> None:
    found, label = volume((20, 41, 33), np.arange(60 * 50, dtype=np.uint8).reshape(60, 50))
    arrays = [
        (array * factor).astype(dtype) for array, factor, dtype in zip((found, label), (99, 1), dtypes, strict=True)
    ]
    case = {each: str(tmp_path / f"{each}.{kind}") for each in ("path", "label_path")}
    for path, array in zip(case.values(), arrays, strict=True):
        save(path, array)
    kept = check(segmentation_3d.build(PATCH, oversampling=0.7), case, seeds=12)
    for array, name in zip(arrays, ("image_volume", "label_volume"), strict=True):
        assert type(kept[name]) is np.ndarray and not kept[name].flags.writeable
        if "scaled" not in kind:
            assert kept[name].dtype.str == array.dtype.str
            np.testing.assert_array_equal(kept[name], array)
            assert kept[name].flags.c_contiguous == (kind == "npy")


def save(path: str, array: Any) -> None:
    if path.endswith(".npy"):
        np.save(path, array)
        return
    nibabel = pytest.importorskip("nibabel")
    header = nibabel.Nifti1Header(
        endianness=array.dtype.newbyteorder("=").str[0] if array.itemsize == 1 else array.dtype.str[0]
    )
    header.set_data_dtype(array.dtype)
    image = nibabel.Nifti1Image(array, np.eye(4), header)
    if "scaled" in path:
        image.header.set_slope_inter(2.0, 1.0)
    nibabel.save(image, path)
