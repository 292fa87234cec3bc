"""What goes wrong on one of several devices, or in the middle."""

from __future__ import annotations

import gc
import logging
import threading
from typing import Any

import pytest
import torch

from minato_gpu.device.functions import FunctionSegment
from minato_gpu.device.output import DeviceOutput, Issued
from tests.device.several import (
    SAMPLE_BYTES,
    Machine,
    check_content,
    labels,
    loader_on,
    machine,
    on_host,
)
from tests.device.test_several_orders import BATCH_BYTES
from tests.support.device_batches import consume
from tests.support.fake_device import LAZY_CONSUMER, LAZY_COPIES, FakeDevice, Order
from tests.support.numbers import BATCH, COSTLY, LENGTH, PIPELINE, Numbers
from tests.support.waiting import wait_until

__all__ = ["machine"]


@pytest.mark.usefixtures("open_from_the_start")
@pytest.mark.parametrize("in_order", [True, False])
def test_a_device_without_memory_retires_and_the_others_go_on(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, in_order: bool
) -> None:
    run = FunctionSegment.run

    def short(self: FunctionSegment, batch: Any, drawn: Any) -> Any:
        if threading.current_thread().name == "minato-device:1":
            raise torch.OutOfMemoryError("no memory for even one sample")
        return run(self, batch, drawn)

    monkeypatch.setattr(FunctionSegment, "run", short)
    devices, made = machine(3, 2), [0, 0, 0]
    loader = loader_on(devices, pipeline=COSTLY, persistent_workers=True, in_order=in_order)
    with caplog.at_level(logging.WARNING, "minato_gpu"):
        for _ in range(3):  # it retires in the first of these, and may have begun with the second by then
            got = consume(devices, loader)
            assert sorted(n for batch in labels(got) for n in batch) == list(range(LENGTH))
            made = [have + loader.stats()["lanes"][f"device:{n}"]["samples"] for n, have in enumerate(made)]
            assert loader.stats()["device_lane"][1]["retired"]
    stats = loader.stats()
    assert [one["retired"] for one in stats["device_lane"]] == [False, True, False]
    assert [record.message.partition(";")[0] for record in caplog.records] == [
        "the device:1 lane has no memory left to prepare samples"
    ]
    assert stats["lanes"]["device:1"]["samples"] == 0 < made[0] + made[2]


def test_leaving_in_the_middle_leaves_nothing_on_any_device(machine: Machine) -> None:
    devices = machine(3, LAZY_CONSUMER)
    loader = loader_on(devices, persistent_workers=True, in_order=False)
    for _ in range(3):
        for number, _batch in enumerate(loader):
            if number == 4:
                break
    del _batch
    assert sorted(n for batch in labels(consume(devices, loader)) for n in batch) == list(range(LENGTH))
    del loader
    gc.collect()
    for device in devices:
        device.finish()
    assert all(device.used == 0 and device.pinned == {} for device in devices)


@pytest.fixture
def short(machine: Machine) -> Any:
    """A device of so many bytes."""

    def make(capacity: int, order: Order = LAZY_COPIES) -> FakeDevice:
        (device,) = machine(1, order)
        device.capacity = capacity
        return device

    return make


@pytest.mark.parametrize("order", [LAZY_COPIES, LAZY_CONSUMER])
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("capacity", [14_000, 24_000, 40_000])
def test_samples_on_the_device_make_room_for_a_batch(
    short: Any, caplog: pytest.LogCaptureFixture, capacity: int, in_order: bool, order: Order
) -> None:
    """The window holds more than ten batches, the device two to seven, with what the consumer has of them: with two it
    is short, with more where the consumer is slower."""
    device = short(capacity, order)
    more: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 16, "timeout": 60}
    loader = loader_on([device], lanes=["device"], in_order=in_order, **more)
    with caplog.at_level(logging.WARNING, "minato_gpu"):
        got = consume([device], loader)
    check_content(got, on_host())
    assert sorted(n for batch in labels(got) for n in batch) == list(range(LENGTH))
    stats = loader.stats()
    said = [record for record in caplog.records if "has no memory for a batch" in record.message]
    assert len(said) == (stats["device"]["short_of_memory"] > 0)
    assert capacity > 14_000 or stats["device"]["short_of_memory"] + stats["device_lane"]["short_of_memory"] > 0
    gc.collect()
    assert device.used == 0


def test_what_nothing_makes_room_for_is_the_consumers_error(short: Any) -> None:
    device = short(1 << 20)
    loader = loader_on([device], lanes=["device"], timeout=60)
    with device.running(device.consumer):
        taken = device.empty((1 << 20) - BATCH_BYTES // 2)
    with pytest.raises(torch.OutOfMemoryError, match="while a batch was loaded"):
        consume([device], loader)
    del taken


@pytest.mark.usefixtures("open_from_the_start")
def test_a_batch_waits_for_a_first_micro_batch_whose_size_nobody_knows(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor is at its first samples, and the device is full, while the first batch is loaded, of samples of
    the other device: that makes none before."""
    issued, empty, held = DeviceOutput.issued, FakeDevice.empty, threading.Event()
    devices, refused, waited = machine(2), list[int](), list[bool]()

    def counted(device: FakeDevice, nbytes: int) -> torch.Tensor:
        try:
            return empty(device, nbytes)
        except torch.OutOfMemoryError:
            refused.append(nbytes)
            raise

    def filled(self: DeviceOutput, items: Any) -> Issued:
        if threading.current_thread().name == "minato-device:1":
            assert held.wait(60)
        elif not held.is_set():
            capacity, devices[0].capacity = devices[0].capacity, devices[0].used
            held.set()
            waited.append(wait_until(lambda: len(refused) > 9))
            devices[0].capacity = capacity
        return issued(self, items)

    monkeypatch.setattr(FakeDevice, "empty", counted)
    monkeypatch.setattr(DeviceOutput, "issued", filled)
    more: dict[str, Any] = {"in_order": False, "num_workers": 1, "prefetch_factor": 8, "timeout": 60}
    loader = loader_on(devices, lanes=["device"], **more)
    got = consume(devices, loader)
    assert waited == [True] and loader.stats()["samples_repeated"] == 0
    assert sorted(n for batch in labels(got) for n in batch) == list(range(LENGTH))


class LosesOne(Numbers):
    """The fourth batch cannot be read."""

    def __getitem__(self, n: int) -> Any:
        if n // BATCH == 3:
            raise ValueError(f"number {n} cannot be read")
        return super().__getitem__(n)


@pytest.mark.parametrize("order", [LAZY_COPIES, LAZY_CONSUMER])
def test_devices_of_one_batch_each_take_turns_also_where_one_batch_is_lost(machine: Machine, order: Order) -> None:
    """What the consumer has of one device is free when it waits for that device's next batch, and not before. The
    sample in the place of the lost batch comes beside what the loader holds there."""
    devices = machine(2, order)
    for device in devices:
        device.capacity = BATCH_BYTES + 2 * SAMPLE_BYTES
    more: dict[str, Any] = {"worker_kind": "thread", "prefetch_factor": 4, "lanes": ["cpu"], "timeout": 60}
    got = consume(devices, loader_on(devices, LosesOne(), pipeline=PIPELINE, on_error="skip", **more))
    keys = [n for batch in labels(got) for n in batch]
    assert len(keys) == LENGTH - BATCH + 1
    assert {*keys} == {n for n in range(LENGTH) if n // BATCH != 3}
