"""The parity check catches every mistake that it is there for. (That it passes on real photographs: see test_cli.)"""

from __future__ import annotations

import dataclasses
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minato_gpu.lab import parity
from minato_gpu.pipeline.pipeline import CupyFunction, DaliFragment, Field, Pipeline, Stage
from minato_gpu.pipeline.stages import Fields, Params
from minato_gpu.samples import StageError
from pipelines import image_classification, image_stages

SIZE = 128


@pytest.fixture(scope="module")
def samples(photographs: Path) -> list[Fields]:
    data = image_classification.dataset(photographs)
    return [data[n] for n in range(len(data))]


def with_fragment(name: str, build: Any) -> Pipeline:
    """The pipeline with another DALI fragment in the stage ``name``."""
    pipeline = image_classification.build(SIZE)
    stages = [
        dataclasses.replace(stage, device=dataclasses.replace(stage.device, build=build))
        if stage.name == name and isinstance(stage.device, DaliFragment)
        else stage
        for stage in pipeline.stages
    ]
    assert [a is b for a, b in zip(stages, pipeline.stages, strict=True)].count(False) == 1
    return dataclasses.replace(pipeline, stages=tuple(stages))


def flip_vertically(dali: Any, fields: Fields, params: Params, device: str) -> Fields:
    return {"image": dali.fn.flip(fields["image"], horizontal=0, vertical=params["mirror"])}


def crop_shifted(dali: Any, fields: Fields, params: Params, device: str) -> Fields:
    # One pixel to the left where there is room, so that the box stays within the picture.
    left = dali.math.max(fields["box"][1:2] - 1, 0)
    start = dali.fn.cat(fields["box"][0:1], left)
    options = {"axes": [0, 1], "output_type": dali.types.RGB}
    return {"image": dali.fn.decoders.image_slice(fields["encoded"], start, fields["box"][2:4], **options)}


def ignore_orientation(dali: Any, fields: Fields, params: Params, device: str) -> Fields:
    image = dali.fn.decoders.image(fields["encoded"], output_type=dali.types.RGB, adjust_orientation=False)
    box = fields["box"]
    return {"image": dali.fn.slice(image, box[0:2], box[2:4], axes=[0, 1], out_of_bounds_policy="pad")}


def resize_with(dali: Any, fields: Fields, params: Params, device: str, *, filter_name: str, antialias: bool) -> Fields:
    filter_ = getattr(dali.types, filter_name)
    return {"image": dali.fn.resize(fields["image"], size=[SIZE, SIZE], interp_type=filter_, antialias=antialias)}


def blue_first(dali: Any, fields: Fields, params: Params, device: str) -> Fields:
    mean, std = (tuple(255 * v for v in values) for values in (image_classification.MEAN, image_classification.STD))
    image = dali.fn.crop_mirror_normalize(
        fields["image"], dtype=dali.types.FLOAT, output_layout="CHW", mean=list(mean[::-1]), std=list(std)
    )
    return {"image": image}


WRONG: dict[str, tuple[str, Any]] = {
    "flip the other way": ("flip", flip_vertically),
    "crop off by one": ("decode", crop_shifted),
    "orientation ignored": ("decode", ignore_orientation),
    "antialiasing on": ("resize", partial(resize_with, filter_name="INTERP_LINEAR", antialias=True)),
    "nearest": ("resize", partial(resize_with, filter_name="INTERP_NN", antialias=False)),
    "channels swapped": ("normalise", blue_first),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_implementation_is_caught_where_it_is_wrong(samples: list[Fields], mistake: str) -> None:
    stage, build = WRONG[mistake]
    results = parity.check(with_fragment(stage, build), samples[:8])
    failed = {result.stage for result in results if not result.passed}
    stages = [s.name for s in image_classification.pipeline().stages]
    number = stages.index(stage)
    assert failed == {stage, *(f"split {split}" for split in range(2, number + 1))}


def deviation(field: Field, reference: Any, value: Any) -> float:
    """Of a stage whose CPU implementation makes one and whose device implementation, over NumPy, the other."""

    def cpu(fields: Fields, params: Params) -> Fields:
        return {"y": reference}

    device = CupyFunction(lambda xp, fields, params: {"y": value})
    made_of = Pipeline((Stage("make", ("x",), {"y": field}, cpu, device),), outputs=("y",))
    found = parity.check(made_of, [{"x": 1}])
    assert len({(result.passed, result.max_deviation) for result in found}) == 1
    assert found[0].passed == (found[0].max_deviation == 0)
    return found[0].max_deviation


LARGE, SMALL = np.iinfo(np.int64).max, np.iinfo(np.int64).min
NAN, INF = float("nan"), float("inf")


class TestValues:
    @pytest.mark.parametrize(
        ("dtype", "reference", "value", "apart"),
        [
            (np.complex64, [1 + 2j], [1 - 2j], 4),
            (np.complex64, [complex(NAN, 2)], [complex(NAN, 3)], 1),
            (np.int64, [2**60], [2**60 + 1], 1),
            (np.int64, [LARGE, 5], [SMALL, 5], 2.0**64),
            (np.uint64, [2**64 - 1], [2**64 - 2], 1),
            (np.bool_, [True], [False], 1),
            (np.float32, [NAN, INF, -INF, 1], [NAN, INF, -INF, 1], 0),
            (np.float32, [NAN], [1], INF),
            (np.float32, [INF], [-INF], INF),
            ("U5", ["abcde"], ["abcdf"], INF),
            ("M8[s]", ["NaT", "2020-01-01"], ["NaT", "2020-01-01"], 0),
            ("M8[s]", ["2020-01-02"], ["2020-01-01"], INF),
        ],
        ids=str,
    )
    def test_of_every_kind_are_compared_exactly(self, dtype: Any, reference: Any, value: Any, apart: float) -> None:
        arrays = np.array(reference, dtype), np.array(value, dtype)
        assert deviation(Field(dtype, (len(reference),)), *arrays) == apart

    @pytest.mark.parametrize(
        ("reference", "value", "apart"),
        [
            ("a", "a", 0),
            ("a", "b", INF),
            ("a", b"a", INF),
            (1, 1.0, 0),
            (1, 2, INF),
            (NAN, NAN, 0),
            (np.zeros(2), np.ones(2), 1),
            (np.zeros(2), np.zeros(3), INF),
        ],
        ids=str,
    )
    def test_in_fields_of_objects_are_equal(self, reference: Any, value: Any, apart: float) -> None:
        assert deviation(Field(object), reference, value) == apart


def test_what_the_cpu_changes_of_its_input_is_seen() -> None:
    def in_place(fields: Fields, params: Params) -> Fields:
        changed = fields["x"]
        changed += 1
        return {"y": changed * 2}

    device = CupyFunction(lambda xp, fields, params: {"y": (fields["x"] + 1) * 2})
    stages = (Stage("change", ("x",), {"y": Field(np.int64, (2,))}, in_place, device),)
    for inputs in (None, {"x": Field(np.int64, (2,))}):
        sample = {"x": np.zeros(2, np.int64)}
        results = parity.check(Pipeline(stages, outputs=("x", "y"), inputs=inputs), [sample], draws=2)
        assert [result.max_deviation for result in results] == [1, 1]
        assert sample["x"].tolist() == [0, 0], "the data set's own is left as it is"


def test_what_cannot_be_compared_is_an_error() -> None:
    device = CupyFunction(lambda xp, fields, params: {"x": fields["x"]})
    same = Stage("same", ("x",), {"x": Field(object)}, _x, device=device)
    samples: Any = [(1, 2)]
    with pytest.raises(TypeError, match=r"the data set returns .* it returned a tuple"):
        parity.check(Pipeline((same,), outputs=("x",)), samples)
    same = dataclasses.replace(same, features=lambda fields: (1, 2), feature_names=("only",))
    with pytest.raises(StageError, match=r"features of stage 'same' of pipeline 'alike' failed: .* 2 features"):
        parity.check(Pipeline((same,), outputs=("x",), name="alike"), [{"x": 1}])


def _x(fields: Fields, params: Params) -> Fields:
    return {"x": fields["x"]}


def test_nothing_to_compare_is_an_error(samples: list[Fields]) -> None:
    stage = Stage("host", ("path",), {"x": Field(object)}, cpu=image_stages.read)
    with pytest.raises(ValueError, match="no stage with a device implementation"):
        parity.check(Pipeline((stage,), outputs=("x",)), samples)
    with pytest.raises(ValueError, match="no usable sample"):
        parity.check(image_classification.pipeline(), [])


class TestRunCheck:
    def test_on_a_folder_with_a_broken_file(self, photographs: Path, tmp_path: Path) -> None:
        (tmp_path / "cat").mkdir()
        shutil.copy(photographs / "chelsea" / "odd.jpg", tmp_path / "cat" / "good.jpg")
        (tmp_path / "cat" / "empty.jpg").touch()
        report = parity.run_check("pipelines.image_classification", str(tmp_path))
        assert report.passed
        (skipped,) = report.skipped
        assert "empty.jpg" in skipped
        assert {row["samples"] for row in report.rows} == {parity.DRAWS}

    def test_where_no_sample_is_usable_the_first_of_the_reasons_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "cat").mkdir()
        (tmp_path / "cat" / "empty.jpg").touch()
        (tmp_path / "cat" / "other.jpg").touch()
        with pytest.raises(ValueError, match=r"no usable sample to compare on; the first of 2: .*/empty.jpg'") as found:
            parity.run_check("pipelines.image_classification", str(tmp_path))
        assert "stage 'read' failed: " in str(found.value)

    def test_a_module_without_the_functions(self) -> None:
        with pytest.raises(AttributeError, match=r"no function example_data\(\)"):
            parity.run_check("pipelines.headers")
        assert not parity.ParityReport([], []).passed, "no rows are no pass"
