"""The contract, with worker processes, worker threads, and the device lane on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from minato_gpu import Pipeline, Stage
from minato_gpu.device.lane import DeviceLane
from minato_gpu.lanes.base import Local, Task
from minato_gpu.lanes.contract import Lane
from minato_gpu.lanes.process_lane import ProcessLane
from minato_gpu.lanes.thread_lane import ThreadLane
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory.status_board import ATTENTION, CONSUMER
from minato_gpu.pipeline.pipeline import Field, TorchFunction
from minato_gpu.scheduling.messages import DEVICE
from tests.lanes.contract import LaneContract, Made, Trace
from tests.lanes.harness import job, marked_task, open_links, piece, task
from tests.lanes.lanes import FORK

X = Field(np.float32, ())


@contextmanager
def _links(*, arenas: bool = True) -> Iterator[WorkerChannels]:
    with open_links(arenas=arenas) as links:
        links.board.words[ATTENTION] = CONSUMER
        yield links


class TestProcesses(LaneContract):
    @contextmanager
    def made(self, trace: Trace) -> Iterator[Made]:
        with _links() as links:
            what = job(trace.make, repeats=True)
            lane: Lane = ProcessLane(links, what, FORK, replaceable=True)
            yield Made(lane, links, partial(marked_task, links))


class TestThreads(LaneContract):
    @contextmanager
    def made(self, trace: Trace) -> Iterator[Made]:
        with _links(arenas=False) as links:
            lane: Lane = ThreadLane(links, job(trace.make, seeds_samples=False))
            yield Made(lane, links, partial(marked_task, links))


class TestDevice(LaneContract):
    kind = DEVICE

    @contextmanager
    def made(self, trace: Trace, on_device: Any = None) -> Iterator[Made]:
        def prepare(fields: Any, params: Any) -> Any:
            return {"y": torch.tensor(trace.make(int(fields["x"])), dtype=torch.float32)}

        def prepare_on_cpu(fields: Any, params: Any) -> Any:
            return {"y": np.float32(trace.make(int(fields["x"])))}

        stages = (
            Stage("read", ("n",), {"x": X}, cpu=lambda fields, params: {"x": np.float32(fields["n"])}),
            Stage("prepare", ("x",), {"y": X}, cpu=prepare_on_cpu, device=TorchFunction(on_device or prepare)),
        )
        pipeline = Pipeline(stages, outputs=("y",), name="tests")

        def made(keys: Sequence[int], chunk: int, run: int) -> Task:
            sources = [Local((pipeline.run({"n": key}, 0, stop=1), None), 8) for key in keys]
            return task(piece(keys, sources=sources), chunk=chunk)._replace(run=run)

        with _links() as links:
            lane: Lane = DeviceLane(links, pipeline, "cpu", 16, may_retire=True)
            yield Made(lane, links, made)

    @contextmanager
    def retiring(self, trace: Trace) -> Iterator[Made]:
        def short(fields: Any, params: Any) -> Any:
            raise torch.OutOfMemoryError("no memory for even one sample")

        with self.made(trace, short) as made:
            yield made
