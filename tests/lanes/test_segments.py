"""Segments: DALI, CuPy and torch stages one after another, over NumPy and CPU tensors where there is no GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu.lanes.device import DeviceExecutor, segments
from minato_gpu.lanes.values import to_numpy
from minato_gpu.pipeline import CupyFunction, DaliFragment, Field, Pipeline, Stage, TorchFunction
from minato_gpu.samples import StageError
from minato_gpu.stages import Fields, Params

ROW = Field(np.float32, (None,))


def add_xp(xp: Any, fields: Fields, params: Params) -> Fields:
    return {"row": fields["row"] + params["amount"]}


def add_torch(fields: Fields, params: Params) -> Fields:
    return {"row": fields["row"] + float(params["amount"])}


def add_dali(dali: Any, fields: Fields, params: Params, device: str) -> Fields:
    return {"row": fields["row"] + params["amount"]}


def refuse_negative(fields: Fields, params: Params) -> Fields:
    if float(fields["row"].min()) < 0:
        raise ValueError("a negative value")
    return {"row": fields["row"]}


def draw_amount(rng: np.random.Generator, meta: Fields) -> Params:
    return {"amount": rng.uniform(0, 10)}


def add(fields: Fields, params: Params) -> Fields:
    return {"row": fields["row"] + params["amount"]}


def mixed() -> Pipeline:
    def stage(name: str, device: Any, **changes: Any) -> Stage:
        parts: dict[str, Any] = {"cpu": add, "draw": draw_amount, **changes}
        return Stage(name, ("row",), {"row": ROW}, device=device, **parts)

    return Pipeline(
        (
            stage("a", DaliFragment(add_dali)),
            stage("b", DaliFragment(add_dali)),
            stage("check", TorchFunction(refuse_negative), cpu=refuse_negative, draw=None),
            stage("c", CupyFunction(add_xp)),
            stage("d", TorchFunction(add_torch)),
            stage("e", DaliFragment(add_dali)),
        ),
        outputs=("row",),
        inputs={"row": ROW},
    )


@pytest.mark.parametrize("kind", ["cupy", "torch"])
def test_a_function_that_works_in_place_may_run_again(kind: str) -> None:
    """A micro-batch that failed runs once more, sample by sample, on what each had brought."""

    def shift(fields: Fields) -> Fields:
        row = fields["row"]
        row += 100
        if float(row[0]) < 0:
            raise ValueError("a negative value")
        return {"row": row}

    how = CupyFunction(lambda xp, f, p: shift(f)) if kind == "cupy" else TorchFunction(lambda f, p: shift(f))
    stage = Stage("shift", reads=("row",), writes={"row": ROW}, cpu=lambda f, p: {"row": f["row"] + 100}, device=how)
    executor = DeviceExecutor(Pipeline((stage,), inputs={"row": ROW}, outputs=("row",)), 0, max_batch=4)
    rows = [{"row": np.full(3, value, np.float32)} for value in (1, -1000, 2)]
    results = executor.run([(row, n) for n, row in enumerate(rows)])
    executor.close()
    assert isinstance(results[1], StageError)
    assert [result["row"][0] for result in results if not isinstance(result, StageError)] == [101, 102]
    assert [row["row"][0] for row in rows] == [1, -1000, 2]


def test_a_device_implementation_must_write_what_the_stage_declares() -> None:
    def misnamed(dali: Any, fields: Fields, params: Params, device: str) -> Fields:
        return {"other": fields["row"]}

    def mistyped(xp: Any, fields: Fields, params: Params) -> Fields:
        return {"row": fields["row"].astype(xp.float64)}

    for device, words in ((DaliFragment(misnamed), "made"), (CupyFunction(mistyped), "dtype float64")):
        wrong = dataclasses.replace(mixed().stages[0], device=device)
        executor = DeviceExecutor(Pipeline((wrong,), outputs=("row",), inputs={"row": ROW}), 0)
        (result,) = executor.run([({"row": np.zeros(2, np.float32)}, 0)])
        assert isinstance(result, StageError)
        assert words in str(result)


def test_consecutive_stages_of_one_kind_are_one_segment() -> None:
    def stage(name: str, device: Any) -> Stage:
        return Stage(name, ("row",), {"row": ROW}, cpu=add, device=device, draw=draw_amount)

    kinds = [CupyFunction(add_xp)] * 2 + [TorchFunction(add_torch)] * 3 + [DaliFragment(add_dali)] * 2
    pipeline = Pipeline(
        tuple(stage(f"s{n}", kind) for n, kind in enumerate(kinds)), outputs=("row",), inputs={"row": ROW}
    )
    options: dict[str, Any] = {"device": "cpu", "max_batch": 4, "threads": 1}
    assert [one.stages for one in segments(pipeline, range(7), **options)] == [range(2), range(2, 5), range(5, 7)]
    executor = DeviceExecutor(pipeline, 0, max_batch=4)
    rows = [{"row": np.full(n + 1, n, np.float32)} for n in range(3)]
    for n, result in enumerate(executor.run([(row, n) for n, row in enumerate(rows)])):
        assert not isinstance(result, StageError)
        np.testing.assert_allclose(result["row"], pipeline.run(rows[n], n)["row"], rtol=1e-6)
    executor.close()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_a_torch_stage_makes_with_gradients_on_needs_none(device: str) -> None:
    """What a module computes, and a parameter as it is."""
    weight = torch.nn.Parameter(torch.full((3,), 2.0))

    def scale(fields: Fields, params: Params) -> Fields:
        return {"row": fields["row"] * weight, "weight": weight}

    before = Stage("before", ("row",), {"row": ROW}, lambda f, p: f, CupyFunction(lambda xp, f, p: f))
    stage = Stage("scale", ("row",), {"row": ROW, "weight": ROW}, lambda f, p: f, TorchFunction(scale))
    pipeline = Pipeline((before, stage), outputs=("row", "weight"), inputs={"row": ROW})
    _, segment = segments(pipeline, range(2), device=device, max_batch=1, threads=1)
    (made,) = segment.run([{"row": torch.ones(3)}], [{1: {}}])  # of the device's: it is not brought there
    for value in made.values():
        assert not getattr(value, "requires_grad", False) and np.asarray(value).tolist() == [2.0] * 3


@pytest.mark.gpu
def test_all_kinds_hand_over_to_each_other_on_a_gpu() -> None:
    pipeline = mixed()
    executor = DeviceExecutor(pipeline, 0, device="cuda", max_batch=4)
    rows = [{"row": np.full(n + 1, n, np.float32)} for n in range(4)]
    for n, result in enumerate(executor.run([(row, n) for n, row in enumerate(rows)])):
        assert not isinstance(result, StageError), result
        assert not isinstance(result["row"], np.ndarray)
        np.testing.assert_allclose(to_numpy(result["row"]), pipeline.run(rows[n], n)["row"], rtol=1e-6)
    assert executor.batches.repeated == 0
    executor.close()
