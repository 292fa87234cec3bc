"""Tasks of a device lane: when they are reported, what their samples are said to cost, and what memory they take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu import Pipeline, Stage
from minato_gpu.lanes.base import Handed, Local, Report, Resident
from minato_gpu.lanes.device import DeviceExecutor
from minato_gpu.lanes.device_lane import DeviceLane
from minato_gpu.lanes.functions import FunctionSegment
from minato_gpu.lanes.links import Links
from minato_gpu.memory.device_budget import DeviceBudget
from minato_gpu.memory.layout import Layout
from minato_gpu.memory.loads import rows_bytes
from minato_gpu.memory.transfers import Host, Transfers
from minato_gpu.pipeline import CupyFunction, Field, TorchFunction
from minato_gpu.samples import sample_seed
from tests.fake_device import LAZY_CONSUMER, LAZY_COPIES, FakeDevice
from tests.lanes.harness import Slab, open_links, piece, task
from tests.waiting import wait_until

X = Field(np.float32, (2,))
SAMPLE_BYTES = 8  # of what a device makes of one
SAMPLE = {"x": np.zeros(2, np.float32), "label": 0}
ROWS = 16


def _read(fields: Any, params: Any) -> Any:
    return {"x": np.full(2, fields["n"], np.float32), "label": fields["n"]}


def _add(fields: Any, params: Any) -> Any:
    return {"x": fields["x"] + 1}


def _double(fields: Any, params: Any) -> Any:
    return {"x": fields["x"] * np.float32(2)}


def pipeline(
    on_device: Callable[[Any, Any], Any] = _add,
    then: Callable[[Any, Any, Any], Any] = lambda xp, fields, params: _double(fields, params),
    cpu: Callable[[Any, Any], Any] = _add,
) -> Pipeline:
    """A host read and two stages for either lane, x -> 2 (x + 1); samples may be cut between those."""
    return Pipeline(
        (
            Stage("read", ("n",), {"x": X, "label": Field(np.int64)}, cpu=_read),
            Stage("add", ("x",), {"x": X}, cpu=cpu, device=TorchFunction(on_device)),
            Stage("double", ("x",), {"x": X}, cpu=_double, device=CupyFunction(then)),
        ),
        outputs=("x", "label"),
        name="tests",
    )


class Bench:
    """One lane on a fake device, and the slabs that its results go to."""

    def __init__(self, links: Links, device: FakeDevice, pipeline: Pipeline, limit: int | None) -> None:
        self.links, self.pipeline = links, pipeline
        self.host = Host(links.engine_arena, device)
        self.transfers = Transfers(device, self.host, DeviceBudget(limit))
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
            return Local(self.pipeline.run({"n": key}, 0, stop=1), SAMPLE_BYTES)
        return Handed(Local(self.pipeline.run({"n": key}, sample_seed(77, 0, key), stop=2), SAMPLE_BYTES), 2)

    def reported(self, chunk: int, limit_s: float = 20.0) -> bool:
        """Whether the chunk is reported in time."""
        return wait_until(lambda: self.report(chunk) is not None, limit_s)

    def report(self, chunk: int) -> Report | None:
        """Its report, once there is one."""
        self.reports += self.lane.receive()
        return next((report for report in self.reports if report.chunk == chunk), None)


@contextmanager
def bench(device: FakeDevice, made: Pipeline | None = None, limit: int | None = None) -> Iterator[Bench]:
    with open_links(1) as links:
        one = Bench(links, device, made or pipeline(), limit)
        try:
            yield one
        finally:
            assert one.lane.close(5.0)
            one.reports.clear()
            one.transfers.close()
            one.host.close()


# --- reports ------------------------------------------------------------------------------------------------------

FIRST, BUSY, LONG = 20, 30, 31


class Gates:
    """What the device does with sample FIRST waits until a second task is there, and what it does with LONG until the
    test lets it; ``busy`` is done with sample BUSY, on the device and then, where that raised, on the CPU."""

    def __init__(self, busy: Callable[[], None] = lambda: None) -> None:
        self.begun, self.sent, self.seen = threading.Event(), threading.Event(), threading.Event()
        self.busy = busy

    def on_device(self, fields: Any, params: Any) -> Any:
        """The stage "add" there."""
        number = int(fields["x"][0])
        if number == FIRST:
            self.begun.set()
            assert self.sent.wait(20)
        if number == BUSY:
            self.busy()
        if number == LONG:
            assert self.seen.wait(20)
        return _add(fields, params)

    def then(self, xp: Any, fields: Any, params: Any) -> Any:
        """The stage "double" there."""
        if int(fields["x"][0]) == LONG + 1:
            assert self.seen.wait(20)
        return _double(fields, params)

    def on_cpu(self, fields: Any, params: Any) -> Any:
        """The stage "add" on the CPU."""
        if int(fields["x"][0]) == BUSY:
            assert self.seen.wait(20)
        return _add(fields, params)

    def run(self, one: Bench, second: Callable[[], Any]) -> bool:
        """Whether the first task is reported while the second, which is sent as soon as it has begun, is at LONG."""
        one.send(FIRST, chunk=1)
        assert self.begun.wait(20)
        second()
        self.sent.set()
        found = one.reported(1, 5.0)
        assert one.report(2) is None
        self.seen.set()
        assert one.reported(2)
        return found


def test_what_the_device_is_through_with_is_reported_before_the_next_is_begun() -> None:
    gates = Gates()
    with bench(FakeDevice(LAZY_CONSUMER), pipeline(gates.on_device)) as one:
        assert gates.run(one, lambda: one.send(LONG, chunk=2))


def test_it_is_reported_between_two_parts_of_the_next() -> None:
    """The device is through with it while the first part is issued, and the second one takes long."""
    device = FakeDevice(LAZY_COPIES)
    gates = Gates(device.finish)
    with bench(device, pipeline(gates.on_device, gates.then)) as one:
        assert gates.run(one, lambda: one.send(BUSY, LONG, cut=(LONG,), chunk=2))


def test_it_is_reported_before_a_sample_of_the_next_is_repeated_on_the_cpu() -> None:
    device = FakeDevice(LAZY_COPIES)

    def fail() -> None:
        device.finish()
        raise ValueError("not on this device")

    gates = Gates(fail)
    with bench(device, pipeline(gates.on_device, cpu=gates.on_cpu)) as one:
        assert gates.run(one, lambda: one.send(BUSY, chunk=2))
        report = one.report(2)
        assert report is not None and report.repeated == 1


def test_it_is_waited_for_before_a_graph_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceExecutor, "built", False)
    gates = Gates()
    with bench(FakeDevice(LAZY_COPIES), pipeline(gates.on_device)) as one:
        assert gates.run(one, lambda: one.send(LONG, chunk=2))


# --- costs --------------------------------------------------------------------------------------------------------

BUSY_S = 4e-3


def _spin() -> None:
    end = time.thread_time() + BUSY_S
    while time.thread_time() < end:
        pass


def test_every_split_point_has_the_cost_of_its_own_samples() -> None:
    """The stand-in works while a part is issued: each costs its own seconds of the cores."""

    def add(fields: Any, params: Any) -> Any:
        _spin()
        return _add(fields, params)

    def double(xp: Any, fields: Any, params: Any) -> Any:
        _spin()
        return _double(fields, params)

    with bench(FakeDevice(LAZY_COPIES), pipeline(add, double)) as one:
        for chunk in (1, 2, 3):
            one.send(20, 21, 22, cut=(21,), chunk=chunk)
        for chunk in (1, 2, 3):
            assert one.reported(chunk)
            report = one.report(chunk)
            assert report is not None and report.times is not None
            assert report.parts == [(split, (each,)) for split, each in zip((1, 2, 1), report.times, strict=True)]
            assert min(report.times[0], report.times[2]) > 1.9 * BUSY_S
            assert 0.9 * BUSY_S < report.times[1] < 0.75 * report.times[0]


class _Timed(FakeDevice):
    """Every piece of its work takes a second: one for each sample."""

    keeps_time = True


def test_a_device_that_keeps_time_says_what_samples_cost() -> None:
    """From the end of the part before, whenever the host issued them and comes to ask."""
    with bench(_Timed(LAZY_COPIES)) as one:
        for chunk in (1, 2, 3):
            one.send(20, 21, 22, 23, cut=(21, 23), chunk=chunk)
        for chunk in (1, 2, 3):
            assert one.reported(chunk)
            report = one.report(chunk)
            assert report is not None and report.times == [1.0] * 4 and report.seconds == 4.0


# --- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 1, 3, 20])
def test_no_more_samples_stay_than_there_is_room_for_and_one_at_a_time_is_made_beyond(room: int) -> None:
    """The room beside a batch, of which the next one may need all: in the account, and on the device."""
    device = FakeDevice(LAZY_COPIES)
    layout = Layout.of(SAMPLE)
    assert layout is not None
    limit = rows_bytes(layout, ROWS) + room * SAMPLE_BYTES
    with bench(device, limit=limit) as one:
        slabs = [one.send(*range(20, 20 + ROWS), chunk=chunk) for chunk in (1, 2)]
        assert one.reported(2)
        items = [item for report in one.reports for item in report.items or [None] * report.done]
        resident = [isinstance(item, Resident) for item in items]
        assert sum(resident) == room and len(items) == 2 * ROWS
        assert device.peak == one.transfers.budget.peak == (room + 1) * SAMPLE_BYTES
        assert one.lane.stats()["spilled_to_host"] == device.fetched == 2 * ROWS - room
        rows = [row for slab in slabs for row in slab.batch()["x"][:, 0].tolist()]
        wanted = [2 * (key + 1) for key in range(20, 20 + ROWS)] * 2
        assert [row for row, stays in zip(rows, resident, strict=True) if not stays] == [
            value for value, stays in zip(wanted, resident, strict=True) if not stays
        ]
        del items
        one.reports.clear()
        device.finish()
        assert wait_until(lambda: one.transfers.budget.held["samples"] == 0) and device.used == 0


def test_while_sizes_are_unknown_samples_are_made_one_by_one_under_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    run = FunctionSegment.run

    def noted(self: FunctionSegment, batch: Any, drawn: Any) -> Any:
        sizes.append(len(batch))
        return run(self, batch, drawn)

    monkeypatch.setattr(FunctionSegment, "run", noted)
    with bench(FakeDevice(), limit=1 << 20) as one:
        sources: list[Any] = [Local(one.pipeline.run({"n": key}, 0, stop=1), 8) for key in range(5)]
        one.lane.send(task(piece(range(5), sources=sources), chunk=1, layout=b""))
        assert one.reported(1)
        assert sizes == [1] * 10, "each in two segments"
        one.transfers.announce(1024)
        one.lane.send(task(piece(range(5), sources=sources), chunk=2, layout=b""))
        assert one.reported(2)
        assert sizes[10:] == [5, 5], "that of a batch is known too"
        assert one.transfers.budget.held["samples"] == 0 < one.transfers.budget.peak


def test_a_micro_batch_that_was_halved_stays_small_under_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget's limit and that of the device's memory are two."""
    run = FunctionSegment.run

    def short(self: FunctionSegment, batch: Any, drawn: Any) -> Any:
        if len(batch) > 2:
            raise torch.OutOfMemoryError(f"{len(batch)} samples")
        return run(self, batch, drawn)

    monkeypatch.setattr(FunctionSegment, "run", short)
    with bench(FakeDevice(LAZY_CONSUMER), limit=1 << 20) as one:
        counts = []
        for chunk in (1, 2, 3):
            one.send(*range(20, 28), chunk=chunk)
            assert one.reported(chunk)
            counts.append(one.lane.stats()["short_of_memory"])
        assert counts[0] > 0 and counts == counts[:1] * 3
        assert one.lane.stats()["micro_batch"] == 2


@pytest.mark.parametrize("use", ["event", "empty", "copy"])
def test_the_fake_device_keeps_its_consumers_stream_from_the_loaders_threads(use: str) -> None:
    """On that the tests of every lane and load rely."""
    device, caught = FakeDevice(), list[BaseException]()
    acts: dict[str, Callable[[], Any]] = {
        "event": device.event,
        "empty": lambda: device.empty(8),
        "copy": lambda: device.copy(torch.zeros(2), torch.ones(2)),
    }

    def act() -> None:
        try:
            acts[use]()
        except AssertionError as error:
            caught.append(error)

    for name in ("minato-device", "somebody"):
        thread = threading.Thread(target=act, name=name)
        thread.start()
        thread.join()
    assert len(caught) == 1
    with pytest.raises(AssertionError, match="wait for the consumer"):
        device.fetch(torch.zeros(2), device.event())
