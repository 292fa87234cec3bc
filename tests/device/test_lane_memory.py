"""Where the device's memory is short: smaller micro-batches, then the CPU lane alone, said once and counted."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from minato_gpu import DataLoader
from minato_gpu.device.accelerator import is_out_of_memory
from minato_gpu.device.executor import _PATIENCE, MicroBatchSize
from minato_gpu.device.functions import FunctionSegment
from minato_gpu.device.loads import rows_bytes
from minato_gpu.device.transfers import Transfers
from minato_gpu.lanes.base import Failure, Resident
from minato_gpu.lanes.store import Store
from minato_gpu.memory.layout import Layout
from tests.device import lane_bench as device_bench
from tests.device.lane_bench import ROWS, SAMPLE, SAMPLE_BYTES, bench, pipeline
from tests.support.fake_device import LAZY_CONSUMER, LAZY_COPIES, FakeDevice, Order
from tests.support.numbers import LENGTH, PIPELINE, Numbers
from tests.support.waiting import wait_until


def test_micro_batches_shrink_until_they_fit_and_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    run = FunctionSegment.run

    def short(self: FunctionSegment, batch: Any, drawn: Any) -> Any:
        if len(batch) > 3:
            raise torch.OutOfMemoryError(f"{len(batch)} samples")
        return run(self, batch, drawn)

    monkeypatch.setattr(FunctionSegment, "run", short)
    with bench(FakeDevice()) as one:
        for chunk in (1, 2):
            one.send(*KEYS, chunk=chunk)
            assert one.reported(chunk)
            assert one.reports[-1].repeated == 0, "the device has made all of them"
            stats = one.lane.stats()
            assert (stats["micro_batch"], stats["short_of_memory"], stats["retired"]) == (2, 4, False), (
                "once more after pools were trimmed"
            )
        one.reports.clear()


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA runtime API error cudaErrorMemoryAllocation (2):\nout of memory"), True),
        (RuntimeError("Error in GPU operator `fn.resize`: Can't allocate 67108864 bytes on device 0."), True),
        (RuntimeError("Error in MIXED operator `decoders.image_slice`: CUDA allocation failed"), True),
        (MemoryError(), True),
        (type("OutOfMemoryError", (Exception,), {})("cupy's own"), True),
        (ValueError("a photograph of someone out of memory"), False),
    ],
)
def test_what_counts_as_short_memory(error: Exception, short: bool) -> None:
    assert is_out_of_memory(error) is short
    outer = ValueError("stage failed")
    outer.__cause__ = error
    assert is_out_of_memory(outer) is short


def test_a_sample_that_no_memory_is_enough_for_says_nothing_of_the_devices() -> None:
    """An absurd header, say: the device lane goes on, with micro-batches as large as before."""

    def grown(fields: Any, params: Any) -> Any:
        if fields["x"][0] == 21:
            raise MemoryError("Unable to allocate 512. TiB")
        return device_bench.add(fields, params)

    with bench(FakeDevice(), pipeline(grown, cpu=grown)) as one:
        one.lane._may_retire = True
        for chunk in (1, 2):
            one.send(20, 21, 22, 23, chunk=chunk)
            assert one.reported(chunk)
            assert [isinstance(item, Failure) for item in one.reports[-1].items or []] == [False, True, False, False]
        stats = one.lane.stats()
        assert (stats["retired"], stats["micro_batch"]) == (False, ROWS)
        one.reports.clear()


@pytest.mark.parametrize("lanes", [["device"], ["cpu", "device"]], ids="+".join)
def test_a_library_that_is_missing_is_named_once_and_the_cpu_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lanes: Any, no_leaks: None
) -> None:
    def load(self: Any) -> None:
        raise ModuleNotFoundError("No module named 'cupy'", name="cupy")

    def run(self: Any, batch: Any, drawn: Any) -> Any:
        load(self)

    monkeypatch.setattr(FunctionSegment, "load", load)
    monkeypatch.setattr(FunctionSegment, "run", run)
    with caplog.at_level(logging.WARNING, "minato_gpu"):
        for _ in range(2):
            loader = DataLoader(Numbers(), 8, num_workers=1, pipeline=PIPELINE, lanes=lanes)
            assert [int(n) for batch in loader for n in batch["label"]] == list(range(LENGTH))
    assert sum("needs cupy" in record.getMessage() for record in caplog.records) == 1
    del loader


ORDERS: list[Order] = [LAZY_COPIES, LAZY_CONSUMER, 0, 1]
KEYS = range(20, 20 + ROWS)


@pytest.mark.parametrize("order", ORDERS)
def test_an_error_that_comes_late_costs_no_sample(order: Order) -> None:
    """Whichever call it comes with, and although every call after that has it too: the CPU prepares what is left."""
    device = FakeDevice(order)
    fails = [1]

    def add(fields: Any, params: Any) -> Any:
        if fields["x"][0] == KEYS[3] and fails:
            fails.pop()
            device.fail(RuntimeError("an illegal memory access was encountered"))
        return device_bench.add(fields, params)

    with bench(device, pipeline(add)) as one:
        slabs = [one.send(*KEYS, chunk=chunk) for chunk in (1, 2)]
        assert one.reported(1) and one.reported(2)
        for slab, report in zip(slabs, one.reports, strict=True):
            assert report.items is None and report.repeated >= ROWS, "all of them lie in their rows"
            assert slab.batch()["x"][:, 0].tolist() == [2 * (key + 1) for key in KEYS]
        device.error = None  # the bench closes what a process would not


@pytest.mark.parametrize("closes", [False, True])
def test_while_nobody_waits_a_full_device_makes_nothing(monkeypatch: pytest.MonkeyPatch, closes: bool) -> None:
    """What it made would go to the host and back. It goes on where the consumer waits, or the loader is closed."""
    layout, pauses = Layout.of(SAMPLE), list[int]()
    assert layout is not None
    await_room = Transfers.await_room

    def noted(transfers: Transfers) -> None:
        pauses.append(1)
        await_room(transfers)

    monkeypatch.setattr(Transfers, "await_room", noted)
    stay = 2 * rows_bytes(layout, ROWS) // (ROWS * SAMPLE_BYTES)
    with bench(FakeDevice(LAZY_COPIES), batches=3) as one:
        one.transfers.waiting(waits=False)
        for chunk in range(stay + 1):
            one.send(*range(20, 20 + ROWS), chunk=chunk)
        assert one.reported(stay - 1) and wait_until(lambda: bool(pauses))
        assert one.lane.stats()["spilled_to_host"] == 0 and one.report(stay) is None
        assert one.lane._work.at_work() == (), "it does not hang"
        if not closes:
            one.transfers.waiting(waits=True)
            assert one.reported(stay) and one.lane.stats()["spilled_to_host"] == ROWS
        one.reports.clear()


def test_a_sample_that_cannot_be_unpickled_fails_alone_and_keeps_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host read of sample 23 has left."""
    get = Store.get

    def refuse(self: Store, item: Any) -> Any:
        begun = get(self, item)
        if begun[0].get("label") == 23:
            raise RuntimeError("cannot be unpickled here")
        return begun

    monkeypatch.setattr(Store, "get", refuse)
    device = FakeDevice(LAZY_CONSUMER)
    with bench(device, limit=1 << 20) as one:
        one.send(20, 23, 22, chunk=1)
        one.send(23, chunk=2)
        assert one.reported(1) and one.reported(2)
        kinds = [[type(item) for item in report.items or []] for report in one.reports]
        assert kinds == [[Resident, Failure, Resident], [Failure]]
        failed = one.reports[1].items[0]  # type: ignore[index]
        assert isinstance(failed, Failure) and failed.origin is not None
        assert failed.origin.index == 23 and failed.origin.lane == "device"
        with pytest.raises(RuntimeError, match="cannot be unpickled here"):
            failed.error.reraise()
        one.reports.clear()
        device.finish()
        assert wait_until(lambda: one.transfers.budget.held["samples"] == 0)


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


def fill(size: MicroBatchSize, count: int) -> None:
    for _ in range(count):
        size.fitted(size.limit)


def test_what_was_halved_grows_again_and_no_further_than_it_was() -> None:
    size = MicroBatchSize(64)
    size.short(64)
    size.short(32)
    assert size.limit == 16
    fill(size, _PATIENCE - 1)
    size.fitted(3)  # not full: it says nothing of 16
    assert size.limit == 16
    fill(size, 1)
    assert size.limit == 32
    fill(size, _PATIENCE)
    assert size.limit == 64
    fill(size, 10 * _PATIENCE)
    assert size.limit == 64


def test_where_that_was_too_much_it_waits_for_twice_as_long() -> None:
    size = MicroBatchSize(64)
    size.short(64)
    waits = []
    for _ in range(3):
        waits.append(0)
        while size.limit == 32:
            fill(size, 1)
            waits[-1] += 1
        size.short(64)
    assert waits == [_PATIENCE, 2 * _PATIENCE, 4 * _PATIENCE]
