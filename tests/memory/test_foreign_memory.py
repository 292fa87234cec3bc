"""Batches of samples that lie in other libraries' memory, which PyTorch borrows: read only while it is theirs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from tests.memory.bench import ORDERS, bench
from tests.support.fake_device import LAZY_COPIES, FakeDevice, Foreign, Order


class _Borrowing(FakeDevice):
    """What is made there lies in another library's memory; to give it back may stop a thread."""

    def adopt(self, value: Any) -> torch.Tensor:
        return super().adopt(Foreign(self, value, blocks=True))


class _EventsAtOnce(_Borrowing):
    """A load's event says at once that it has come to pass: what is read is given back too early."""

    def event(self, timed: bool = False) -> Any:
        event = super().event(timed)
        if self.current is not self.consumer:
            event.query = lambda: True
        return event


def epoch(device: FakeDevice, maker: FakeDevice | None = None) -> list[Any]:
    """What the consumer read that was not what it should have been."""
    with bench(device) as one:
        for value in range(1, 13):
            load = one.load(value, (1, 2, 5) if value % 2 else (), maker)
            batch = one.take(load)
            del load
            one.transfers.sweep()
            gc.collect()
            one.check(batch, value)
            del batch
        device.finish()
        if maker is not None:
            maker.finish()
        return one.wrong


@pytest.mark.parametrize("order", ORDERS)
def test_it_is_read_before_it_is_given_back(order: Order) -> None:
    assert epoch(_Borrowing(order)) == []


@pytest.mark.parametrize("order", ORDERS)
def test_that_of_another_device_too(order: Order) -> None:
    device = FakeDevice(order)
    assert epoch(device, _Borrowing(order, beside=[device])) == []


def test_what_is_given_back_too_early_shows() -> None:
    assert epoch(_EventsAtOnce(LAZY_COPIES)) != []
