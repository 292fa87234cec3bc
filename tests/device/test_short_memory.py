"""Where a device has no memory for a batch: what leaves it, what waits, and when that is the consumer's error."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

from minato_gpu.device.collated import ValueLoad
from minato_gpu.device.loads import Load, rows_bytes
from tests.device.bench import ORDERS, ROWS, bench, layout
from tests.support.fake_device import FakeDevice, Order


def test_a_batch_that_finds_no_memory_raises_for_the_consumer_and_the_next_goes_on() -> None:
    with bench(FakeDevice(capacity=100)) as one:
        load = one.load(1)
        with pytest.raises(torch.OutOfMemoryError):
            one.take(load)
        one.device.capacity = 1 << 20
        one.check(one.take(one.load(2)), 2)
        assert one.wrong == [] and one.allocated() == 0


class _EventFails(FakeDevice):
    """There is no memory for the first event after a load."""

    failed = False

    def event(self, timed: bool = False) -> Any:
        if threading.current_thread().name == "minato-copies" and not self.failed:
            self.failed = True
            raise torch.OutOfMemoryError("for an event")
        return super().event(timed)


@pytest.mark.parametrize("order", ORDERS[:2])
def test_a_load_whose_event_finds_no_memory_is_issued_once_more_with_all_its_rows(order: Order) -> None:
    device = _EventFails(order)
    with bench(device) as one:
        one.check(one.take(one.load(1, on_device=(1, 2, 5))), 1)
        device.finish()
        assert one.wrong == [] and device.failed
    gc.collect()
    assert device.used == 0


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("later", ["rows", "scattered", "value"])
def test_batches_that_are_loaded_ahead_leave_for_the_one_that_is_due(order: Order, later: str) -> None:
    """The device holds two batches: one that the consumer has, and whichever came first of those to come."""
    nbytes = rows_bytes(layout(), ROWS)
    device, seen = FakeDevice(order, capacity=2 * nbytes + nbytes // 2), []
    with bench(device) as one:
        held = one.take(one.load(1))
        one.submitted = 2  # the batch before it is not complete yet
        if later == "rows":
            behind: Load = one.load(3, on_device=(1, 2))
        elif later == "scattered":
            behind = one.scattered(3)
        else:
            behind = ValueLoad(lambda: {"image": torch.full((nbytes // 4,), 3.0), "other": ("a", 3)}, nbytes)
            one.submit(behind)
        one.issued(behind)
        one.submitted = 1
        one.check(one.take(one.load(2)), 2)
        assert one.transfers.stats()["unloaded"] == 1
        one.check(held, 1)
        del held
        gc.collect()
        batch = one.take(behind)
        if later == "value":
            assert batch["other"] == ("a", 3)
            device.read(batch["image"], lambda t: seen.append(t.unique().tolist()))
        else:
            one.check(batch, 3)
        del batch
        device.finish()
        assert one.wrong == [] and seen == [[3.0]] * (later == "value")
        assert one.allocated() == 0 and one.transfers.budget.held["batches"] == 0
    gc.collect()
    assert device.used == 0


@pytest.mark.parametrize("order", ORDERS)
def test_samples_that_another_device_needs_the_memory_of_leave_it_before_their_batch_is_loaded(order: Order) -> None:
    """One batch is under way, the other waits for room in the budget."""
    device = FakeDevice(order)
    maker = FakeDevice(order, beside=[device])
    with bench(device, limit=1) as one:
        first, second = one.load(1, (1, 2, 6), maker), one.load(2, (0, 3), maker)
        one.issued(first)
        one.transfers.evict_samples()
        gc.collect()
        assert maker.used == 0 and not second.issued
        one.check(one.take(first), 1)
        one.check(one.take(second), 2)
        device.finish()
        maker.finish()
        assert one.wrong == []
