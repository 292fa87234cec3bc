"""What a device lane makes is in its device's account before it is made, and keeps within the budget (P4)."""

from __future__ import annotations

from typing import Any

import pytest

from minato_gpu.lanes.base import Failure, Local, Resident
from minato_gpu.lanes.device_output import DeviceOutput
from minato_gpu.lanes.functions import FunctionSegment
from minato_gpu.lanes.store import Store
from minato_gpu.memory.layout import Layout
from minato_gpu.memory.loads import rows_bytes
from tests.lanes.device_bench import ROWS, SAMPLE, SAMPLE_BYTES, bench, short_beyond
from tests.lanes.harness import piece, task
from tests.support.fake_device import LAZY_CONSUMER, LAZY_COPIES, FakeDevice
from tests.support.waiting import wait_until


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
        assert one.lane.stats()["spilled_to_host"] == 2 * ROWS - room
        rows = [row for slab in slabs for row in slab.batch()["x"][:, 0].tolist()]
        wanted = [2 * (key + 1) for key in range(20, 20 + ROWS)] * 2
        assert [row for row, stays in zip(rows, resident, strict=True) if not stays] == [
            value for value, stays in zip(wanted, resident, strict=True) if not stays
        ]
        del items
        one.reports.clear()
        device.finish()
        assert wait_until(lambda: one.transfers.budget.held["samples"] == 0) and device.used == 0


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many samples each run of a segment had, in turn."""
    found: list[int] = []
    run = FunctionSegment.run

    def noted(self: FunctionSegment, batch: Any, drawn: Any) -> Any:
        found.append(len(batch))
        return run(self, batch, drawn)

    monkeypatch.setattr(FunctionSegment, "run", noted)
    return found


@pytest.mark.parametrize("order", [LAZY_COPIES, LAZY_CONSUMER])
def test_where_no_bytes_were_named_what_has_no_room_is_made_together_and_goes_home_together(
    order: str, sizes: list[int]
) -> None:
    """Three batches, of which one is set aside: two stay. A device that made the others one by one would be no use."""
    layout = Layout.of(SAMPLE)
    assert layout is not None
    stay = 2 * rows_bytes(layout, ROWS) // (ROWS * SAMPLE_BYTES)  # micro-batches, whose samples are a part of a batch
    with bench(FakeDevice(order), batches=3) as one:
        slabs = {chunk: one.send(*range(20, 20 + ROWS), chunk=chunk) for chunk in range(stay + 2)}
        assert one.reported(stay + 1)
        assert sizes == [ROWS] * (2 * len(slabs)), "each in two segments"
        resident = {
            report.chunk: {isinstance(item, Resident) for item in report.items or [None]} for report in one.reports
        }
        assert resident == {chunk: {chunk < stay} for chunk in slabs}
        assert one.lane.stats()["spilled_to_host"] == 2 * ROWS
        for chunk in (stay, stay + 1):
            assert slabs[chunk].batch()["x"][:, 0].tolist() == [2 * (key + 1) for key in range(20, 20 + ROWS)]
        one.reports.clear()


def test_while_sizes_are_unknown_samples_are_made_one_by_one_under_a_budget(sizes: list[int]) -> None:
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
    short_beyond(monkeypatch, 2)
    with bench(FakeDevice(LAZY_CONSUMER), limit=1 << 20) as one:
        counts = []
        for chunk in (1, 2, 3):
            one.send(*range(20, 28), chunk=chunk)
            assert one.reported(chunk)
            counts.append(one.lane.stats()["short_of_memory"])
        assert counts[0] > 0 and counts == counts[:1] * 3
        assert one.lane.stats()["micro_batch"] == 2


UNREADABLE = 23


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host read of one sample has left cannot be read in this process."""
    get = Store.get

    def refuse(self: Store, item: Any) -> Any:
        fields = get(self, item)
        if isinstance(fields, dict) and fields.get("label") == UNREADABLE:
            raise RuntimeError("cannot be unpickled here")
        return fields

    monkeypatch.setattr(Store, "get", refuse)


@pytest.mark.usefixtures("unreadable")
def test_a_sample_that_cannot_be_unpickled_fails_alone_and_keeps_no_room() -> None:
    device = FakeDevice(LAZY_CONSUMER)
    with bench(device, limit=1 << 20) as one:
        one.send(20, UNREADABLE, 22, chunk=1)
        one.send(UNREADABLE, chunk=2)
        assert one.reported(1) and one.reported(2)
        kinds = [[type(item) for item in report.items or []] for report in one.reports]
        assert kinds == [[Resident, Failure, Resident], [Failure]]
        failed = one.reports[1].items[0]  # type: ignore[index]
        assert isinstance(failed, Failure) and failed.origin is not None
        assert failed.origin.index == UNREADABLE and failed.origin.lane == "device"
        with pytest.raises(RuntimeError, match="cannot be unpickled here"):
            failed.error.reraise()
        one.reports.clear()
        device.finish()
        assert wait_until(lambda: one.transfers.budget.held["samples"] == 0)


def test_what_was_reserved_for_samples_that_were_not_begun_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def boom(self: DeviceOutput) -> Any:
        raise RuntimeError("not even begun")

    with bench(FakeDevice(LAZY_CONSUMER), limit=1 << 20) as one:
        with monkeypatch.context() as patch:
            patch.setattr(DeviceOutput, "working", boom)
            one.send(20, 21, chunk=1)
            assert one.reported(1)
        assert one.transfers.budget.held["samples"] == 0 < one.transfers.budget.peak
        assert one.reports[0].items is None and one.reports[0].repeated == 2, "the CPU has filled their rows"


def test_a_lane_that_finds_the_device_full_of_what_came_before_does_not_retire() -> None:
    """A consumer that is away for long leaves more than a batch there. Once that has gone there is room again."""
    device = FakeDevice(LAZY_CONSUMER)
    with bench(device) as one:
        one.lane._may_retire = True
        for chunk in range(4):
            one.send(*range(20, 20 + ROWS), chunk=chunk)
            assert one.reported(chunk)
        device.capacity = device.used
        before = one.send(20, 21, chunk=4)
        assert one.reported(4) and one.report(4).repeated == 2  # type: ignore[union-attr]
        assert before.batch()["x"][:2, 0].tolist() == [42, 44], "the CPU has prepared them"
        one.reports.clear()
        device.finish()
        assert wait_until(lambda: one.transfers.budget.held["samples"] == 0)
        one.send(20, 21, chunk=5)
        assert one.reported(5) and one.report(5).repeated == 0  # type: ignore[union-attr]
        one.reports.clear()
        stats = one.lane.stats()
        assert (stats["retired"], stats["micro_batch"]) == (False, ROWS)


def test_a_lane_that_finds_the_device_full_of_one_batch_retires() -> None:
    device = FakeDevice(LAZY_CONSUMER)
    with bench(device) as one:
        one.lane._may_retire = True
        one.send(20, chunk=1)
        assert one.reported(1)
        device.capacity = device.used
        one.send(20, 21, chunk=2)
        assert one.reported(2) and one.lane.retired
        one.reports.clear()
