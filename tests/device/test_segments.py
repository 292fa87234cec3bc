"""Segments: DALI, CuPy and torch stages one after another, over NumPy and CPU tensors where there is no GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu.device.executor import DeviceExecutor, segments
from minato_gpu.device.functions import FunctionSegment
from minato_gpu.device.staging import Upload
from minato_gpu.device.values import to_numpy
from minato_gpu.pipeline.pipeline import CupyFunction, DaliFragment, Field, Pipeline, Stage, TorchFunction
from minato_gpu.pipeline.stages import Fields, Params
from minato_gpu.samples import StageError
from tests.support.fake_device import LAZY_COPIES, FakeDevice

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


def _same(fields: Any, params: Any) -> Any:
    return {"x": fields["x"], "n": fields["n"]}


def test_a_gpus_torch_stage_does_not_wait_for_what_it_is_given() -> None:
    """``torch.tensor(array, device="cuda")`` waits for the stream, at every sample."""
    device = FakeDevice(LAZY_COPIES)
    writes = {"x": Field(np.float32, (2,)), "n": Field(np.int64)}
    read = Stage("read", ("k",), writes, cpu=_same)
    stage = Stage("same", ("x", "n"), writes, cpu=_same, device=TorchFunction(_same))
    pipeline = Pipeline((read, stage), outputs=("x",), name="tests")
    segment = FunctionSegment(pipeline, range(1, 2), device="cuda", upload=Upload(device))
    batch = [{"x": np.full(2, number, np.float32), "n": np.int64(number)} for number in range(4)]
    stream = device.stream()
    with device.running(stream):
        made = segment.run(batch, [{1: {}}] * 4)
    assert (stream.issued, stream.done) == (4, 0), "one copy for each, and none has run"
    assert device.waited == []
    device.finish()
    assert [(one["x"].tolist(), int(one["n"])) for one in made] == [([float(n)] * 2, n) for n in range(4)]


SHIFTS = np.arange(4, dtype=np.float32)  # the data set's own, whoever draws of them


def _draw(rng: np.random.Generator, meta: Any) -> Any:
    return {"shifts": SHIFTS[1:]}


def _sum(fields: Any, params: Any) -> Any:
    """All that it is given, twice, and changed where it lies."""
    row, (numbers, view), shifts = fields["row"], fields["parts"], params["shifts"]
    for one in (row, view, shifts):
        one *= 2
    numbers.append(sum(numbers))
    if float(row[0]) < 0:
        raise ValueError("a negative value")
    return {"sum": row + float(view.sum()) + float(shifts.sum()) + sum(numbers)}


@pytest.mark.parametrize("kind", ["cupy", "torch"])
@pytest.mark.parametrize("nested", ["array", "view"])
def test_what_a_function_is_given_is_its_own(kind: str, nested: str) -> None:
    """A micro-batch that failed runs once more, sample by sample; and what passes through is as it was."""
    how = CupyFunction(lambda xp, fields, params: _sum(fields, params)) if kind == "cupy" else TorchFunction(_sum)
    stage = Stage("sum", ("row", "parts"), {"sum": Field(np.float32, (3,))}, cpu=_sum, device=how, draw=_draw)
    pipeline = Pipeline((stage,), outputs=("sum", "row", "parts"), name="tests")
    whole = torch.arange(9.0).view(3, 3)  # a data set in memory, of whose rows samples are views
    whole[1, 0] = -1
    before, lists = whole.clone(), [[1, 2] for _ in range(3)]
    parts: list[Any] = [whole[2] if nested == "view" else np.full(2, n) for n in range(3)]
    samples = [{"row": whole[n], "parts": (lists[n], parts[n])} for n in range(3)]
    executor = DeviceExecutor(pipeline, 0, max_batch=4)
    results = executor.run([(sample, n) for n, sample in enumerate(samples)])
    executor.close()
    assert torch.equal(whole, before) and lists == [[1, 2]] * 3 and SHIFTS.tolist() == [0, 1, 2, 3]
    assert isinstance(results[1], StageError)
    for n in (0, 2):
        result = results[n]
        assert not isinstance(result, StageError)
        wanted = 2 * before[n] + 2 * float(parts[n].sum()) + 12 + 6
        assert np.array_equal(result["sum"], wanted)
        assert result["row"] is samples[n]["row"] and result["parts"] is samples[n]["parts"]
