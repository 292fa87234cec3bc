"""The device lane: what a device fails goes to the CPU, when tasks are reported, and what samples are said to cost."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest

from minato_gpu.device.loads import rows_bytes
from minato_gpu.lanes.base import Resident
from minato_gpu.lanes.contract import Opened
from minato_gpu.lanes.cpu_time import CoreTime
from minato_gpu.memory.layout import Layout
from tests.device.lane_bench import ROWS, SAMPLE, SAMPLE_BYTES, add, bench, pipeline
from tests.support.fake_device import LAZY_CONSUMER, LAZY_COPIES, FakeDevice, FakeEvent
from tests.support.leaks import leaks, take_snapshot
from tests.support.waiting import wait_until


class _Gated(FakeDevice):
    """The host waits for an event only once the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def event(self, timed: bool = False) -> Any:
        """See Accelerator."""
        device = self

        class Event(FakeEvent):
            def synchronize(self) -> None:
                assert device.gate.wait(60)
                super().synchronize()

        return Event(self, self.current)


def test_a_device_has_two_micro_batches_in_flight() -> None:
    """The second is issued while the first is waited for; a third is not; no second of the device counts twice."""
    device, begun, all_sent = _Gated(), list[int](), threading.Event()

    def note(fields: Any, params: Any) -> Any:
        assert all_sent.wait(60)  # else the lane may wait for the first before there is a second
        begun.append(int(fields["x"][0]))
        return add(fields, params)

    with bench(device, pipeline(note)) as one:
        for chunk in range(3):
            one.send(20 + 2 * chunk, 21 + 2 * chunk, chunk=chunk)
        all_sent.set()
        assert wait_until(lambda: len(begun) == 4)
        assert one.lane.receive() == [Opened(1)] and begun == [20, 21, 22, 23]
        device.gate.set()
        assert all(one.reported(chunk) for chunk in range(3))
        assert [report.chunk for report in one.reports] == [0, 1, 2]
        assert all(a.end <= b.begin for a, b in itertools.pairwise(one.reports))


def test_what_the_device_is_through_with_is_reported_before_the_next_is_begun() -> None:
    """The first task waits until the second is there, whose sample waits until the first is reported."""
    begun, sent, seen = threading.Event(), threading.Event(), threading.Event()

    def on_device(fields: Any, params: Any) -> Any:
        number = int(fields["x"][0])
        if number == 20:
            begun.set()
            assert sent.wait(60)
        assert number == 20 or seen.wait(60)
        return add(fields, params)

    with bench(FakeDevice(LAZY_CONSUMER), pipeline(on_device)) as one:
        one.send(20, chunk=1)
        assert begun.wait(60)
        one.send(31, chunk=2)
        sent.set()
        assert one.reported(1) and one.report(2) is None
        seen.set()
        assert one.reported(2)


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


def test_a_thread_that_ended_is_let_go() -> None:
    before, cores = take_snapshot(), CoreTime("Library")
    named, stop = threading.Event(), threading.Event()

    def live() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("[Library] Executor")
        named.set()
        stop.wait(60)

    thread = threading.Thread(target=live)
    thread.start()
    assert named.wait(60)
    cores.look()
    stop.set()
    thread.join()
    assert cores() >= 0.0
    cores.look()
    cores.close()
    cores.close()
    assert not leaks(before)


@pytest.mark.parametrize("room", [0, 1, 3, 20])
def test_no_more_samples_stay_than_there_is_room_for_and_one_at_a_time_is_made_beyond(room: int) -> None:
    """The room beside a batch, of which the next one may need all: in the account, and on the device."""
    device = FakeDevice(LAZY_COPIES)
    layout = Layout.of(SAMPLE)
    assert layout is not None
    with bench(device, limit=rows_bytes(layout, ROWS) + room * SAMPLE_BYTES) as one:
        for chunk in (1, 2):
            one.send(*range(20, 20 + ROWS), chunk=chunk)
        assert one.reported(2)
        items = [item for report in one.reports for item in report.items or [None] * report.done]
        assert sum(isinstance(item, Resident) for item in items) == room and len(items) == 2 * ROWS
        assert device.peak == one.transfers.budget.peak == (room + 1) * SAMPLE_BYTES
        assert one.lane.stats()["spilled_to_host"] == 2 * ROWS - room
        assert device.fetched == 0, "each went home by a copy that waits for nothing"
        del items
        one.reports.clear()
        device.finish()
        assert wait_until(lambda: one.transfers.budget.held["samples"] == 0) and device.used == 0
