"""The device lane: what a device fails goes to the CPU, when tasks are reported, and what samples are said to cost."""

from __future__ import annotations

import itertools
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minato_gpu.device.budget import DeviceBudget
from minato_gpu.device.loads import rows_bytes
from minato_gpu.device.output import DeviceOutput
from minato_gpu.device.pinned_memory import PinnedArena
from minato_gpu.device.transfers import Transfers
from minato_gpu.lanes.base import Local, Resident
from minato_gpu.lanes.contract import Opened
from minato_gpu.lanes.cpu_time import CoreTime
from minato_gpu.lanes.store import Store
from minato_gpu.memory.layout import Layout
from tests.device.lane_bench import ROWS, SAMPLE, SAMPLE_BYTES, add, bench, pipeline
from tests.lanes.harness import open_links, piece, task
from tests.support.fake_device import LAZY_CONSUMER, LAZY_COPIES, FakeDevice, FakeEvent, FakeStream
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


MADE = frozenset({"image", "count", "word"})
COUNT = 20


def sample(number: int) -> dict[str, Any]:
    image = np.full((2, 1 + number), number, np.float32)
    return {"image": image, "count": np.array(number), "word": "a", "label": number, "name": np.full(2, number)}


@pytest.fixture(params=[LAZY_COPIES, LAZY_CONSUMER, 4])
def device(request: pytest.FixtureRequest) -> FakeDevice:
    return FakeDevice(request.param)


def _stream(outlet: DeviceOutput) -> FakeStream:
    stream: Any = outlet.stream
    assert isinstance(stream, FakeStream)
    return stream


@pytest.mark.parametrize("layout", [None, b""])
def test_a_micro_batch_goes_home_in_one_copy_while_the_next_is_issued(device: FakeDevice, layout: Any) -> None:
    with open_links(1) as links:
        host = PinnedArena(links.engine_arena, links.loans, device)
        transfers = Transfers(device, host, DeviceBudget(1 << 20))
        outlet = DeviceOutput(Store(-1, links), transfers)
        asked = task(piece(range(COUNT)), layout=layout)
        issued = []
        for _ in range(2):
            assert outlet.room is not None
            outlet.room.reserve(asked, MADE, COUNT)
            with outlet.working():
                items = [outlet.put(asked, asked.pieces[0], n, sample(n), MADE) for n in range(COUNT)]
                before = _stream(outlet).issued
                issued.append(outlet.issued(items))
        if device.order == LAZY_COPIES:
            assert _stream(outlet).done == 0, "nobody has waited"
            assert _stream(outlet).issued - before == 1, "all of it in one call"
            assert not any(one.finished for one in issued)
        assert device.fetched == 0 and transfers.budget.held["samples"] > 0
        for one in issued:
            for number, item in enumerate(outlet.settle(one)[0]):
                assert isinstance(item, Local)
                for name, wanted in sample(number).items():
                    got = item.value[name]
                    assert type(got) is (np.int64 if name == "count" else type(wanted)) and np.array_equal(got, wanted)
        assert (outlet.layout is None) is (layout is None)
        if outlet.layout is not None:
            of_first: Any = Layout.of({**sample(0), "count": np.int64(0), "image": np.zeros((2, COUNT), np.float32)})
            assert [leaf.shape for leaf in pickle.loads(outlet.layout).leaves] == [
                leaf.shape for leaf in of_first.leaves
            ]
        issued.clear()
        del one
        assert transfers.budget.held["samples"] == 0
        device.finish()
        assert device.used == 0
        transfers.close()
        host.close()


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
        del items
        one.reports.clear()
        device.finish()
        assert wait_until(lambda: one.transfers.budget.held["samples"] == 0) and device.used == 0
