"""What a torch stage on a GPU is given comes there without anybody waiting for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from minato_gpu import Pipeline, Stage
from minato_gpu.lanes.functions import FunctionSegment
from minato_gpu.memory.staging import Upload
from minato_gpu.pipeline import Field, TorchFunction
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
