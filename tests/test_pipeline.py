"""Fields, stages and pipelines: what they accept, what they refuse, and how they run on the CPU."""

from __future__ import annotations

import dataclasses
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

from minato_gpu import DataLoader
from minato_gpu.pipeline.pipeline import CupyFunction, Field, Pipeline, Stage
from minato_gpu.pipeline.stages import DaliFragment, Fields, Params, Tolerance, canonical
from minato_gpu.pipeline.undeclared_writes import suggest_writes
from minato_gpu.samples import StageError

NUMBER = Field(np.float32)


def double(fields: Fields, params: Params) -> Fields:
    return {"x": np.float32(fields["x"] * 2)}


def double_xp(xp: Any, fields: Fields, params: Params) -> Fields:
    return {"x": fields["x"] * 2}


def draw_shift(rng: np.random.Generator, meta: Fields) -> Params:
    return {"shift": rng.uniform(0, float(meta["width"])), "steps": int(rng.integers(5))}


def shift(fields: Fields, params: Params) -> Fields:
    return {"x": np.float32(fields["x"] + params["shift"]), "steps": params["steps"]}


def read(fields: Fields, params: Params) -> Fields:
    return {"x": np.float32(fields["path"]), "width": np.int32(7)}


def stage(name: str = "double", **changes: Any) -> Stage:
    parts: dict[str, Any] = {"reads": ("x",), "writes": {"x": NUMBER}, "cpu": double, **changes}
    return Stage(name, **parts)


def three_stages() -> Pipeline:
    return Pipeline(
        (
            stage(
                "read",
                reads=("path",),
                writes={"x": NUMBER, "width": Field(np.int32)},
                cpu=read,
                features=lambda fields: (len(fields["path"]),),
                feature_names=("characters",),
            ),
            stage("double", device=CupyFunction(double_xp)),
            stage(
                "shift",
                cpu=shift,
                draw=draw_shift,
                meta=("width",),
                writes={"x": NUMBER, "steps": Field(np.int32)},
                device=CupyFunction(double_xp),
            ),
        ),
        outputs=("x", "label", "steps"),
        name="three",
    )


class TestDefinition:
    def test_splits_and_host_prefix(self) -> None:
        pipeline = three_stages()
        assert pipeline.host_prefix == 1
        assert pipeline.splits == (1, 2, 3)

    @pytest.mark.parametrize(
        ("make", "error", "words"),
        [
            (lambda: Pipeline((), outputs=("x",)), ValueError, "at least one stage"),
            (lambda: Pipeline(cast(Any, (double,)), outputs=("x",), inputs={}), TypeError, "must be Stage objects"),
            (lambda: Pipeline(cast(Any, stage()), outputs=("x",)), TypeError, "got the stage 'double' alone"),
            (lambda: Pipeline((stage(),), outputs=("x",), inputs=cast(Any, ("x",))), TypeError, "inputs must map"),
            (
                lambda: Pipeline((stage(),), outputs=("x",), tolerance={"gpu": Tolerance()}),
                ValueError,
                "tolerance is keyed by 'cpu' or 'cuda', got 'gpu'",
            ),
            (lambda: Pipeline((stage(), stage()), outputs=("x",)), ValueError, "two stages are called 'double'"),
            (lambda: Pipeline((stage(),), outputs=()), ValueError, "at least one field"),
            (lambda: Pipeline((stage(),), outputs=cast(Any, "x")), TypeError, "sequence of names"),
            (lambda: Pipeline((stage(),), outputs=("x",), inputs={}), ValueError, "stage 'double' reads field 'x'"),
            (
                lambda: Pipeline((stage(),), outputs=("y",), inputs={"x": NUMBER}),
                ValueError,
                "output 'y' is neither an input",
            ),
        ],
    )
    def test_a_definition_that_cannot_work_is_refused(
        self, make: Callable[[], Pipeline], error: type[Exception], words: str
    ) -> None:
        with pytest.raises(error, match=words):
            make()

    def test_drawing_from_a_field_that_a_lane_makes_is_refused(self) -> None:
        late = stage("late", writes={"x": NUMBER, "width": NUMBER}, device=CupyFunction(double_xp))
        drawing = stage("drawing", draw=draw_shift, meta=("width",))
        with pytest.raises(ValueError, match=r"'drawing' draws from 'width'.*stage 'late' writes"):
            Pipeline((late, drawing), outputs=("x",))


class TestUndeclaredWrites:
    def test_they_are_refused_with_the_way_to_be_shown_them(self) -> None:
        stages = tuple(dataclasses.replace(stage, writes={}) for stage in three_stages().stages)
        with pytest.raises(ValueError, match=r"stage 'read' does not declare what it writes; .*suggest_writes"):
            Pipeline(stages, outputs=("x",))
        assert suggest_writes(stages, [{"path": "4"}]).splitlines() == [
            'read: writes={"x": Field(np.float32), "width": Field(np.int32)},',
            'double: writes={"x": Field(np.float32)},',
            'shift: writes={"x": Field(np.float32), "steps": Field(np.int32)},',
        ]

    def test_a_size_in_which_samples_differ_is_left_open(self) -> None:
        def write(fields: Fields, params: Params) -> Fields:
            rows = fields["x"]
            return {
                "image": np.zeros((rows, 3), np.uint8),
                "text": "a",
                "share": 0.5,
                "mixed": rows if rows > 1 else 0.5,
            }

        shown = suggest_writes([stage("a", writes={}, cpu=write), stage("b")], [{"x": 1}, {"x": 2}])
        assert shown == (
            'a: writes={"image": Field(np.uint8, (None, 3)), "text": Field(object), "share": Field(np.float64), '
            '"mixed": Field(object)},'
        )

    def test_a_stage_that_fails_is_named(self) -> None:
        with pytest.raises(StageError, match="stage 'double' failed: KeyError: 'x'"):
            suggest_writes([stage(writes={})], [{}])


class TestRun:
    def test_outputs_only_and_in_order(self) -> None:
        done = three_stages().run({"path": "4", "label": 1}, seed=5)
        assert list(done) == ["x", "label", "steps"]
        assert done["label"] == 1
        assert 8 <= done["x"] <= 15

    def test_cut_anywhere_it_is_the_same(self) -> None:
        pipeline = three_stages()
        whole = pipeline.run({"path": "4", "label": 1}, 5)
        for cut in range(4):
            early = pipeline.run({"path": "4", "label": 1}, 5, stop=cut) if cut else {"path": "4", "label": 1}
            kept = {name: value for name, value in early.items() if name in pipeline.live(cut)}
            assert pipeline.run(kept, 5, start=cut) == whole

    def test_draws_depend_on_the_seed_and_the_stage_alone(self) -> None:
        pipeline = three_stages()
        fields = pipeline.run({"path": "4", "label": 1}, 5, stop=1)
        first = pipeline.draw(2, fields, 5)
        assert pipeline.draw(2, {"width": fields["width"]}, 5) == first
        assert pipeline.draw(2, fields, 6) != first
        assert pipeline.draw(1, fields, 5) == {}
        moved = dataclasses.replace(pipeline, stages=(pipeline.stages[0], pipeline.stages[2]), outputs=("x",))
        assert moved.draw(1, fields, 5) != first

    def test_an_error_names_stage_lane_and_path(self) -> None:
        with pytest.raises(StageError, match="stage 'read' failed: ValueError") as caught:
            three_stages().run({"path": "four", "label": 1}, 5)
        origin = caught.value.origin
        assert (origin.stage, origin.lane, origin.path) == ("read", "cpu", "four")
        assert isinstance(caught.value.__cause__, ValueError)

    def test_a_stage_gets_the_fields_that_it_declares_to_read(self) -> None:
        """A device implementation gets no others either."""
        undeclared = stage(cpu=lambda fields, params: {"x": fields["x"] + fields["label"]})
        with pytest.raises(StageError, match="KeyError: 'label'") as found:
            Pipeline((undeclared,), outputs=("x", "label")).run({"x": 1, "label": 1}, 0)
        assert found.value.__cause__ is not None
        assert "which is not among its reads ('x',)" in found.value.__cause__.__notes__[0]

    def test_an_interrupt_is_not_wrapped(self) -> None:
        def interrupt(fields: Fields, params: Params) -> Fields:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            Pipeline((stage(cpu=interrupt),), outputs=("x",)).run({"x": 1}, 0)

    @pytest.mark.parametrize(
        ("returned", "words"),
        [
            ({}, "returned the fields"),
            (None, "returned a NoneType"),
            ({"x": np.float64(1)}, "has dtype float64"),
        ],
    )
    def test_a_stage_must_write_what_it_declares(self, returned: Any, words: str) -> None:
        pipeline = Pipeline((stage(cpu=lambda fields, params: returned),), outputs=("x",))
        with pytest.raises(StageError, match=words):
            pipeline.run({"x": 1}, 0)

    @pytest.mark.parametrize("sample", [(1, 2), "x"])
    def test_a_data_set_without_names_is_told_what_to_return(self, sample: Any) -> None:
        with pytest.raises(TypeError, match=r"the data set returns .* a mapping of 'x'; it returned a"):
            Pipeline((stage(),), outputs=("x",)).run(sample, seed=0)

    def test_what_the_data_set_returns_is_checked(self) -> None:
        with pytest.raises(StageError, match=r"needs field 'label' of .* samples; this one has 'path'") as found:
            three_stages().run({"path": "4"}, 5)
        assert found.value.origin.path == "4" and isinstance(found.value.__cause__, ValueError)
        with pytest.raises(StageError, match=r"needs field 'label', 'path' of .* this one has none"):
            three_stages().run({}, 5)
        pair = Field(np.float32, (2,))
        declared = Pipeline((stage(writes={"x": pair}),), outputs=("x",), inputs={"x": pair, "more": Field(object)})
        with pytest.raises(StageError, match="the data set's field 'x' has shape"):
            declared.run({"x": np.zeros(3, np.float32)}, 0)
        with pytest.raises(StageError, match="the data set's field 'x' has dtype"):
            declared.run({"x": np.zeros(2)}, 0)
        assert "x" in declared.run({"x": np.zeros(2, np.float32)}, 0)

    def test_python_numbers_become_numbers_of_the_declared_type(self) -> None:
        def mean(fields: Fields, params: Params) -> Fields:
            return {"mean": float(fields["x"]), "count": 3, "above": True, "any": 0.5, "array": np.zeros(2, np.float32)}

        array = {"any": Field(object), "array": Field(np.float32, (2,))}
        numbers = {"mean": NUMBER, "count": Field(np.int32), "above": Field(np.bool_)}
        inputs = {"x": NUMBER, "label": Field(np.int64), "name": Field(object)}
        stages = (stage("mean", cpu=mean, writes={**numbers, **array}),)
        made = Pipeline(stages, outputs=(*inputs, *numbers, *array), inputs=inputs)
        given = {"x": 0.1, "label": 7, "name": 5}
        outputs = made.run(given, 0)
        expected = {"x": np.float32, "label": np.int64, "name": int, "mean": np.float32, "count": np.int32}
        expected |= {"above": np.bool_, "any": float, "array": np.ndarray}
        assert {name: type(value) for name, value in outputs.items()} == expected
        assert outputs["mean"] == np.float32(0.1) and outputs["label"] == 7
        assert type(given["x"]) is float, "what the data set has returned stays as it is"
        batch = next(iter(DataLoader(cast("Any", [given] * 2), batch_size=2, pipeline=made)))
        dtypes = {"mean": torch.float32, "count": torch.int32, "above": torch.bool, "x": torch.float32}
        assert {name: batch[name].dtype for name in dtypes} == dtypes

    @pytest.mark.parametrize(
        ("features", "kind", "words"),
        [
            (lambda fields: (1, 2), ValueError, "ValueError: returned 2 features for ('only',)"),
            (lambda fields: 1, TypeError, "TypeError: returned a int, not a sequence of numbers for ('only',)"),
            (lambda fields: (fields["y"],), KeyError, "KeyError: 'y'"),
        ],
        ids=["too many", "no sequence", "raises"],
    )
    def test_wrong_features_are_an_error(self, features: Any, kind: type[Exception], words: str) -> None:
        pipeline = Pipeline((stage(features=features, feature_names=("only",)),), outputs=("x",), name="doubling")
        with pytest.raises(StageError) as found:
            pipeline.features({"x": 1, "path": "4"})
        assert str(found.value) == f"features of stage 'double' of pipeline 'doubling' failed: {words}"
        assert (found.value.origin.stage, found.value.origin.path) == ("double", "4")
        assert isinstance(found.value.__cause__, kind)
        assert found.value.__cause__.__notes__ == ["in features of stage 'double' of pipeline 'doubling'"]


def test_a_spawned_process_gets_the_same_sample() -> None:
    from pipelines import image_classification

    pipeline = image_classification.pipeline()
    fields = {"path": "nowhere.jpg", "label": 3}
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        with pytest.raises(StageError, match="stage 'read' failed: FileNotFoundError") as caught:
            pool.apply(pipeline.run, (fields, 1))
        assert caught.value.origin.path == "nowhere.jpg"
    copied: Pipeline = pickle.loads(pickle.dumps(pipeline))
    meta = {"size": np.array([300, 500], np.int32)}
    assert np.array_equal(copied.draw(1, meta, 9)["box"], pipeline.draw(1, meta, 9)["box"])


# --- fields and stages ------------------------------------------------------------------------------------------------


def fragment(dali: Any, fields: Fields, params: Params, device: str) -> Fields:
    return {"x": fields["x"]}


class TestField:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: Field(np.uint8, (-1,)),
            lambda: Field(np.uint8, (None, 3), maximum=(10, 4)),
            lambda: Field(np.uint8, (None, 3), layout="HWC"),
            lambda: Field(np.uint8, level=0),
            lambda: Tolerance(-1),
            lambda: Tolerance(1, float("nan")),
        ],
    )
    def test_nonsense_is_refused(self, make: Callable[[], Any]) -> None:
        with pytest.raises(ValueError):
            make()

    @pytest.mark.parametrize("shape", [5, (2.5,)])
    def test_a_shape_is_a_sequence_of_sizes(self, shape: Any) -> None:
        with pytest.raises(TypeError, match="shape must be a sequence of sizes"):
            Field(np.uint8, shape)

    @pytest.mark.parametrize(
        ("field", "value", "words"),
        [
            (Field(np.uint8, (2,)), np.zeros(2, np.float32), "dtype float32, declared uint8"),
            (Field(np.uint8, (2,)), np.zeros(3, np.uint8), r"shape \(3,\), declared \(2,\)"),
            (Field(np.uint8, (None,), maximum=(4,)), np.zeros(5, np.uint8), "over the declared maximum"),
            (Field(np.uint8, (2,)), [1, 2], "is a list"),
            (Field(np.int32), 2.5, "is 2.5, which is no int32"),
            (Field(np.uint8), 256, "is 256, which is no uint8"),
        ],
    )
    def test_problem_says_what_is_wrong(self, field: Field, value: Any, words: str) -> None:
        problem = field.problem(value)
        assert problem is not None
        with pytest.raises(ValueError, match=words):
            raise ValueError(problem)


class TestStage:
    @pytest.mark.parametrize(
        ("changes", "error", "words"),
        [
            ({"name": ""}, TypeError, "name"),
            ({"reads": "x"}, TypeError, "reads must be a sequence of names"),
            ({"writes": {"x": np.float32}}, TypeError, "must map names to Field"),
            ({"reads": 5}, TypeError, "stage 'double': reads must be a sequence of names, got 5"),
            ({"reads": {"x"}}, TypeError, "reads must be a sequence of names, got {'x'}"),
            ({"reads": iter(["x"])}, TypeError, "reads must be a sequence of names, got <list_iterator"),
            ({"tolerance": {"cpu": 1e-6}}, TypeError, "must map names to Tolerance, got 'cpu': 1e-06"),
            ({"cpu": None}, TypeError, "cpu must be callable"),
            ({"device": fragment}, TypeError, "must be a DaliFragment"),
            ({"meta": ("x",)}, ValueError, "no draw"),
            ({"features": len}, ValueError, "feature_names go together"),
            ({"tolerance": {"dali": Tolerance()}}, ValueError, "keyed by 'cpu' or 'cuda'"),
            ({"device": DaliFragment(fragment, host_reads=("y",))}, ValueError, "not among its reads"),
        ],
    )
    def test_a_definition_that_cannot_work_is_refused(
        self, changes: dict[str, Any], error: type[Exception], words: str
    ) -> None:
        with pytest.raises(error, match=words):
            stage(**changes)

    def test_drawn_values_get_the_width_that_devices_use(self) -> None:
        assert canonical(3).dtype == np.int32
        assert canonical(0.1) == np.float32(0.1)
        assert canonical(True).dtype == np.bool_
        assert canonical([1, 2]).dtype == np.int32
        assert canonical(np.float64(0.1)).dtype == np.float64
        for wide in (2**31, -(2**31) - 1, 2**63, 2**64, [0, 2**64]):
            with pytest.raises(OverflowError, match="32 bits"):
                canonical(wide)
