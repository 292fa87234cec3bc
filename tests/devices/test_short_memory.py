"""Where a device has no memory for a batch: samples leave it for the host, executors hold less, and that is said."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.contracts.checks import NOTHING, differences
from tests.devices.several import SAMPLE_BYTES, Gated, Machine, check_content, consume, labels, loader_on, on_host
from tests.devices.test_budget import BATCH_BYTES
from tests.support.fake_device import LAZY_CONSUMER, LAZY_COPIES, FakeDevice, Order
from tests.support.numbers import BATCH, COSTLY, LENGTH, PIPELINE, Numbers, Plain
from tests.support.waiting import wait_until

SAID = "has no memory for a batch"


@pytest.fixture
def short(machine: Machine) -> Any:
    """A device of so many bytes."""

    def make(capacity: int, order: Order = LAZY_COPIES) -> FakeDevice:
        (device,) = machine(1, order)
        device.capacity = capacity
        return device

    return make


def said(caplog: pytest.LogCaptureFixture) -> int:
    return sum(SAID in record.message for record in caplog.records)


@pytest.mark.parametrize("order", [LAZY_COPIES, LAZY_CONSUMER])
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("capacity", [14_000, 24_000, 40_000])
def test_samples_on_the_device_make_room_for_a_batch(
    short: Any, caplog: pytest.LogCaptureFixture, capacity: int, in_order: bool, order: Order
) -> None:
    """The window holds more than ten batches, the device two to seven, with what the consumer has of them: with two it
    is short, with more where the consumer is slower."""
    device = short(capacity, order)
    more: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 16, "timeout": 30}
    loader = loader_on([device], lanes=["device"], in_order=in_order, **more)
    with caplog.at_level(logging.WARNING, "minato_gpu"):
        got = consume([device], loader)
    check_content(got, on_host())
    assert differences(range(LENGTH), [n for batch in labels(got) for n in batch]) == NOTHING
    stats = loader.stats()
    assert said(caplog) == (stats["device"]["short_of_memory"] > 0)
    assert capacity > 14_000 or stats["device"]["short_of_memory"] + stats["device_lane"]["short_of_memory"] > 0
    gc.collect()
    assert device.used == 0


def test_the_cpu_lane_goes_on(short: Any, caplog: pytest.LogCaptureFixture) -> None:
    device = short(14_000)
    loader = loader_on([device], pipeline=COSTLY, lanes=["cpu", "device"], prefetch_factor=8, timeout=30)
    with caplog.at_level(logging.WARNING, "minato_gpu"):
        check_content(consume([device], loader), on_host())
    assert said(caplog) <= 1


def test_batches_ahead_wait_where_there_is_no_memory_for_them(short: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Without samples on it either, and without a budget: only the due one has to be loaded."""
    device = short(3 * BATCH_BYTES)
    loader = loader_on([device], Plain(), num_workers=1, prefetch_factor=16, timeout=30)

    def slowly() -> Iterator[Any]:
        iterator = iter(loader)
        yield next(iterator)
        assert wait_until(lambda: loader.stats()["device"]["short_of_memory"])
        yield from iterator

    with caplog.at_level(logging.WARNING, "minato_gpu"):
        assert [n for batch in labels(consume([device], slowly())) for n in batch] == list(range(LENGTH))
    assert said(caplog) == 1 <= loader.stats()["device"]["short_of_memory"]


def test_a_batch_that_came_too_early_leaves_for_the_due_one(short: Any) -> None:
    """The consumer has one, and one of those behind the due one lies on the device, which holds no third."""
    device, gate = short(5 * BATCH_BYTES // 2), threading.Event()
    data = Gated(BATCH + 3, gate)
    loader = loader_on([device], data, worker_kind="thread", prefetch_factor=4, timeout=30)

    def gated() -> Iterator[Any]:
        iterator = iter(loader)
        yield next(iterator)
        assert wait_until(lambda: loader.stats()["device"]["batches"] > 1)
        gate.set()
        yield from iterator

    assert [n for batch in labels(consume([device], gated())) for n in batch] == list(range(LENGTH))
    assert loader.stats()["device"]["unloaded"] >= 1
    gc.collect()
    assert device.used == 0


def test_what_nothing_makes_room_for_is_the_consumers_error(short: Any) -> None:
    device = short(1 << 20)
    loader = loader_on([device], lanes=["device"], timeout=30)
    with device.running(device.consumer):
        taken = device.empty((1 << 20) - BATCH_BYTES // 2)
    with pytest.raises(torch.OutOfMemoryError, match="while a batch was loaded"):
        consume([device], loader)
    del taken


def test_leaving_while_room_is_made_leaves_nothing(short: Any) -> None:
    device = short(20_000)
    for count in range(1, 6):
        loader = loader_on([device], lanes=["device"], num_workers=1, prefetch_factor=16, timeout=30)
        for number, _ in enumerate(loader, 1):
            if number == count:
                break
        del loader, _
        gc.collect()
        device.finish()
        assert device.used == 0


class LosesOne(Numbers):
    """The fourth batch cannot be read."""

    def __getitem__(self, n: int) -> Any:
        if n // BATCH == 3:
            raise ValueError(f"number {n} cannot be read")
        return super().__getitem__(n)


@pytest.mark.parametrize("order", [LAZY_COPIES, LAZY_CONSUMER])
def test_devices_of_one_batch_each_take_turns_also_where_one_batch_is_lost(machine: Machine, order: Order) -> None:
    """What the consumer has of one device is free when it waits for that device's next batch, and not before."""
    devices = machine(2, order)
    for device in devices:
        device.capacity = BATCH_BYTES
    more: dict[str, Any] = {"worker_kind": "thread", "prefetch_factor": 4, "lanes": ["cpu"], "timeout": 30}
    got = consume(devices, loader_on(devices, LosesOne(), pipeline=PIPELINE, on_error="skip", **more))
    keys = [n for batch in labels(got) for n in batch]
    assert len(keys) == LENGTH - BATCH + 1
    assert differences([n for n in range(LENGTH) if n // BATCH != 3], sorted({*keys})) == NOTHING


@pytest.mark.parametrize("order", [LAZY_COPIES, LAZY_CONSUMER, 957])
def test_samples_for_batches_of_other_devices_make_room_too(machine: Machine, order: Order) -> None:
    """Out of order a batch takes what any device has made, and may have to wait until its own has room for it."""
    devices = machine(3, order)
    for device in devices:
        device.capacity = BATCH_BYTES + 2 * SAMPLE_BYTES
    more: dict[str, Any] = {"in_order": False, "max_lateness": 8, "num_workers": 1, "timeout": 30}
    for _ in range(2):
        got = consume(devices, loader_on(devices, pipeline=COSTLY, lanes=["cpu", "device"], **more))
        assert differences(range(LENGTH), [n for batch in labels(got) for n in batch]) == NOTHING
    gc.collect()
    assert all(device.used == 0 for device in devices)
