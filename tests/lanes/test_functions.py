"""What a torch stage on a GPU is given comes there without anybody waiting for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import minato_gpu.engine.building
import minato_gpu.memory.accelerator
from minato_gpu import DataLoader, Pipeline, Stage
from minato_gpu.lanes.device import DeviceExecutor
from minato_gpu.lanes.functions import FunctionSegment
from minato_gpu.memory.staging import Upload
from minato_gpu.pipeline import CupyFunction, Field, TorchFunction
from minato_gpu.samples import StageError
from tests.fake_device import LAZY_COPIES, FakeDevice


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


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("kind", ["cupy", "torch"])
def test_texts_that_a_function_makes_are_stacked_and_made_by_it(
    kind: str, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice(LAZY_COPIES)
    monkeypatch.setattr(minato_gpu.memory.accelerator, "available", lambda _: True)
    monkeypatch.setattr(minato_gpu.engine.building, "Accelerator", lambda _: device)
    how = CupyFunction(lambda xp, f, p: _text(f)) if kind == "cupy" else TorchFunction(lambda f, p: _text(f))
    writes = {"row": Field(np.float32, (3,)), "text": Field(object)}
    read = Stage("read", ("n",), {"row": writes["row"]}, cpu=_rows)
    stage = Stage("text", ("row",), writes, cpu=_refused, device=how)
    pipeline = Pipeline((read, stage), outputs=("row", "text"), name="tests")
    data: Any = [{"n": n} for n in range(8)]
    more: dict[str, Any] = {"device": "cuda"} if on_device else {}
    loader: Any = DataLoader(
        data,
        2,
        num_workers=1,
        worker_kind="thread",
        pipeline=pipeline,
        lanes=["device"],
        **more,
    )
    assert [batch["text"] for batch in loader] == [[f"{n}", f"{n + 1}"] for n in range(0, 8, 2)]
    device.finish()


def _rows(fields: Any, params: Any) -> Any:
    return {"row": np.full(3, fields["n"], np.float32)}


def _text(fields: Any) -> Any:
    return {"row": fields["row"] * 2, "text": f"{int(fields['row'][0])}"}


def _refused(fields: Any, params: Any) -> Any:
    raise AssertionError("made once more on the CPU")
