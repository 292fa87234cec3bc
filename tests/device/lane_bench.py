"""One device lane on a fake device, driven by tasks; its pipeline's stages are the test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from minato_gpu import Pipeline, Stage
from minato_gpu.device.budget import DeviceBudget
from minato_gpu.device.lane import DeviceLane
from minato_gpu.device.pinned_memory import PinnedArena
from minato_gpu.device.transfers import Transfers
from minato_gpu.lanes.base import Handed, Local, Report
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.pipeline.pipeline import CupyFunction, Field, TorchFunction
from minato_gpu.samples import sample_seed
from tests.lanes.harness import Slab, open_links, piece, task
from tests.support.fake_device import FakeDevice
from tests.support.waiting import wait_until

X = Field(np.float32, (2,))
SAMPLE_BYTES = 8  # of what a device makes of one
SAMPLE = {"x": np.zeros(2, np.float32), "label": np.int64(0)}
ROWS = 16


def _read(fields: Any, params: Any) -> Any:
    return {"x": np.full(2, fields["n"], np.float32), "label": fields["n"]}


def add(fields: Any, params: Any) -> Any:
    return {"x": fields["x"] + 1}


def double(fields: Any, params: Any) -> Any:
    return {"x": fields["x"] * np.float32(2)}


def pipeline(
    on_device: Callable[[Any, Any], Any] = add,
    then: Callable[[Any, Any, Any], Any] = lambda xp, fields, params: double(fields, params),
    cpu: Callable[[Any, Any], Any] = add,
) -> Pipeline:
    """A host read and two stages for either lane, x -> 2 (x + 1); samples may be cut between those."""
    return Pipeline(
        (
            Stage("read", ("n",), {"x": X, "label": Field(np.int64)}, cpu=_read),
            Stage("add", ("x",), {"x": X}, cpu=cpu, device=TorchFunction(on_device)),
            Stage("double", ("x",), {"x": X}, cpu=double, device=CupyFunction(then)),
        ),
        outputs=("x", "label"),
        name="tests",
    )


class Bench:
    """One lane on a fake device, and the slabs that its results go to."""

    def __init__(self, links: WorkerChannels, device: FakeDevice, pipeline: Pipeline, budget: DeviceBudget) -> None:
        self.links, self.pipeline = links, pipeline
        self.host = PinnedArena(links.engine_arena, links.loans, device)
        self.transfers = Transfers(device, self.host, budget)
        self.transfers.waiting(waits=True)  # or the lane would wait for room where it has none
        self.lane = DeviceLane(links, pipeline, "cpu", ROWS, transfers=self.transfers)
        self.reports: list[Report] = []

    def send(self, *keys: int, cut: tuple[int, ...] = (), chunk: int = 0) -> Slab:
        """A task with these samples; those in ``cut`` come from the CPU lane with their first stage done."""
        slab = Slab(self.links, SAMPLE, ROWS)
        sources: list[Any] = [self._source(key, cut) for key in keys]
        given = piece(keys, slab=slab.offset, sources=sources)._replace(rows=slab.rows)
        self.lane.send(task(given, chunk=chunk, layout=slab.bytes))
        return slab

    def _source(self, key: int, cut: tuple[int, ...]) -> Any:
        if key not in cut:
            return Local((self.pipeline.run({"n": key}, 0, stop=1), None), SAMPLE_BYTES)
        fields = self.pipeline.run({"n": key}, sample_seed(77, 0, key), stop=2)
        return Handed(Local((fields, {2: {}}), SAMPLE_BYTES), 2)

    def reported(self, chunk: int) -> bool:
        """Whether the chunk is reported in time."""
        return wait_until(lambda: self.report(chunk) is not None)

    def report(self, chunk: int) -> Report | None:
        """Its report, once there is one."""
        self.reports += [told for told in self.lane.receive() if isinstance(told, Report)]
        return next((report for report in self.reports if report.chunk == chunk), None)


@contextmanager
def bench(
    device: FakeDevice, made: Pipeline | None = None, limit: int | None = None, batches: int = 0
) -> Iterator[Bench]:
    with open_links(1) as links:
        one = Bench(links, device, made or pipeline(), DeviceBudget(limit, batches))
        try:
            yield one
        finally:
            assert one.lane.close(5.0)
            one.reports.clear()
            one.transfers.close()
            one.host.close()
