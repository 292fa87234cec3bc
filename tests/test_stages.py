"""Field, Tolerance and Stage: what they accept and what they refuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minato_gpu.stages import DaliFragment, Field, Fields, Params, Stage, Tolerance, canonical


def double(fields: Fields, params: Params) -> Fields:
    return {"x": np.float32(fields["x"] * 2)}


def fragment(dali: Any, fields: Fields, params: Params, device: str) -> Fields:
    return {"x": fields["x"]}


def stage(**changes: Any) -> Stage:
    parts: dict[str, Any] = {
        "name": "double",
        "reads": ("x",),
        "writes": {"x": Field(np.float32)},
        "cpu": double,
        **changes,
    }
    return Stage(**parts)


class TestField:
    def test_a_fixed_shape_has_a_size_in_bytes(self) -> None:
        assert Field(np.float32, (3, 5)).fixed
        assert Field(np.float32, (3, 5)).max_bytes == 60

    def test_a_varying_shape_is_bounded_by_its_maximum_only(self) -> None:
        assert not Field(np.uint8, (None, 3)).fixed
        assert Field(np.uint8, (None, 3)).max_bytes is None
        assert Field(np.uint8, (None, 3), maximum=(10, 3)).max_bytes == 30

    def test_objects_have_no_size(self) -> None:
        assert not Field(object).fixed
        assert Field(object).max_bytes is None

    @pytest.mark.parametrize(
        "make",
        [
            lambda: Field(np.uint8, (-1,)),
            lambda: Field(np.uint8, (None, 3), maximum=(10, 4)),
            lambda: Field(np.uint8, (None, 3), maximum=(10,)),
            lambda: Field(np.uint8, (None, 3), layout="HWC"),
            lambda: Field(np.uint8, level=0),
            lambda: Tolerance(-1),
            lambda: Tolerance(1, float("nan")),
        ],
    )
    def test_nonsense_is_refused(self, make: Callable[[], Any]) -> None:
        with pytest.raises(ValueError):
            make()

    @pytest.mark.parametrize("shape", [5, "ab", (2.5,)])
    def test_a_shape_is_a_sequence_of_sizes(self, shape: Any) -> None:
        with pytest.raises(TypeError, match="shape must be a sequence of sizes"):
            Field(np.uint8, shape)

    @pytest.mark.parametrize(
        ("field", "value", "words"),
        [
            (Field(np.uint8, (2,)), np.zeros(2, np.float32), "dtype float32, declared uint8"),
            (Field(np.uint8, (2,)), np.zeros(3, np.uint8), r"shape \(3,\), declared \(2,\)"),
            (Field(np.uint8, (None,)), np.zeros((3, 3), np.uint8), "shape"),
            (Field(np.uint8, (None,), maximum=(4,)), np.zeros(5, np.uint8), "over the declared maximum"),
            (Field(np.uint8, (2,)), [1, 2], "is a list"),
            (Field(np.int32), 2.5, "is 2.5, which is no int32"),
            (Field(np.int32), float("nan"), "is nan, which is no int32"),
            (Field(np.uint8), 256, "is 256, which is no uint8"),
            (Field(np.bool_), 2, "is 2, which is no bool"),
        ],
    )
    def test_problem_says_what_is_wrong(self, field: Field, value: Any, words: str) -> None:
        problem = field.problem(value)
        assert problem is not None
        with pytest.raises(ValueError, match=words):
            raise ValueError(problem)

    def test_no_problem(self) -> None:
        assert Field(np.uint8, (None, 2), maximum=(9, 2)).problem(np.zeros((9, 2), np.uint8)) is None
        assert Field(np.int64).problem(3) is None
        assert Field(np.float32).problem(0.1) is None
        assert Field(np.float32).problem(float("nan")) is None
        assert Field(np.int64).problem(3.0) is None
        assert Field(object).problem("anything") is None

    def test_python_numbers_stay_where_torch_makes_no_batch_of_scalars(self) -> None:
        assert type(Field(np.uint32).typed(3)) is np.uint32
        for dtype in (np.uint64, object, ">f4"):
            assert type(Field(dtype).typed(3)) is int


class TestStage:
    @pytest.mark.parametrize(
        ("changes", "error", "words"),
        [
            ({"name": ""}, TypeError, "name"),
            ({"reads": "x"}, TypeError, "reads must be a sequence of names"),
            ({"reads": ("x", "x")}, ValueError, "twice"),
            ({"writes": {}}, ValueError, "writes no field"),
            ({"writes": {"x": np.float32}}, TypeError, "must map names to Field"),
            ({"writes": ["x"]}, TypeError, "stage 'double': writes must map names to Field"),
            ({"reads": 5}, TypeError, "stage 'double': reads must be a sequence of names, got 5"),
            ({"tolerance": Tolerance()}, TypeError, "stage 'double': tolerance must map names to Tolerance"),
            ({"tolerance": {"cpu": 1e-6}}, TypeError, "must map names to Tolerance, got 'cpu': 1e-06"),
            ({"cpu": None}, TypeError, "cpu must be callable"),
            ({"draw": 3}, TypeError, "draw must be callable"),
            ({"device": fragment}, TypeError, "must be a DaliFragment"),
            ({"meta": ("x",)}, ValueError, "no draw"),
            ({"features": len}, ValueError, "feature_names go together"),
            ({"feature_names": ("x",)}, ValueError, "feature_names go together"),
            ({"tolerance": {"dali": Tolerance()}}, ValueError, "keyed by 'cpu' or 'cuda'"),
            ({"device": DaliFragment(fragment, host_reads=("y",))}, ValueError, "not among its reads"),
        ],
    )
    def test_a_definition_that_cannot_work_is_refused(
        self, changes: dict[str, Any], error: type[Exception], words: str
    ) -> None:
        with pytest.raises(error, match=words):
            stage(**changes)

    def test_it_cannot_be_changed(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            stage().name = "other"  # type: ignore[misc]

    def test_drawn_values_get_the_width_that_devices_use(self) -> None:
        assert canonical(3).dtype == np.int32
        assert canonical(0.1) == np.float32(0.1)
        assert canonical(True).dtype == np.bool_
        assert canonical([1, 2]).dtype == np.int32
        assert canonical(np.float64(0.1)).dtype == np.float64
        with pytest.raises(OverflowError, match="32 bits"):
            canonical(2**31)
