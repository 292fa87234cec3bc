"""Batch number k is on device k modulo theirs, each sample once and the same, whatever the devices' streams do; every
device keeps its own budget; and the end of an epoch, where the last round may not be whole."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from minato_gpu import DataLoader
from minato_gpu.device.copies import CopyRange
from minato_gpu.device.loads import DeviceRow, MicroBatchOutput, rows_bytes
from minato_gpu.lanes.base import Resident
from minato_gpu.memory.layout import Layout
from tests.device.several import (
    BATCHES,
    ORDERS,
    SAMPLE_BYTES,
    Gated,
    Machine,
    check_content,
    labels,
    loader_on,
    machine,
    names,
    on_host,
)
from tests.support.device_batches import LANES, check_same, consume
from tests.support.fake_device import LAZY_COPIES, FakeDevice, Order
from tests.support.numbers import BATCH, LENGTH, PIPELINE, Plain

__all__ = ["machine"]


@pytest.mark.each_value  # a second each
@pytest.mark.parametrize(("order", "count"), [(ORDERS[-1], 3), *((order, 2) for order in ORDERS)])
@pytest.mark.parametrize("lanes", LANES[::-1], ids="+".join)
def test_strict_order(machine: Machine, order: Order, count: int, lanes: list[str]) -> None:
    """The batches of one device, in turn; what a device has made never goes to another."""
    devices = machine(count, order)
    loader = loader_on(devices, shuffle=True, lanes=lanes)
    check_same(consume(devices, loader), on_host(shuffle=True))
    stats = loader.stats()
    assert [one["batches"] for one in stats["device"]] == [len(range(n, BATCHES, count)) for n in range(count)]
    assert [device.crossed for device in devices] == [0] * count
    assert [one["crossed"] for one in stats["device"]] == [0] * count
    if lanes == ["device"]:
        made = [stats["lanes"][f"device:{n}"]["samples"] for n in range(count)]
        assert made == [sum(min(BATCH, LENGTH - k * BATCH) for k in range(n, BATCHES, count)) for n in range(count)]
    gc.collect()
    assert all(device.used == 0 and device.pinned == {} for device in devices)


@pytest.mark.each_value  # a second each
@pytest.mark.parametrize(("order", "count"), [(ORDERS[-1], 3), *((order, 2) for order in ORDERS)])
@pytest.mark.parametrize("lanes", LANES[::-1], ids="+".join)
def test_out_of_order(machine: Machine, order: Order, count: int, lanes: list[str]) -> None:
    """Exactly once, the same content, and late by no more than allowed, from whichever device samples come."""
    devices = machine(count, order)
    got = consume(devices, loader_on(devices, lanes=lanes, in_order=False, max_lateness=3))
    keys = labels(got)
    assert sorted(n for batch in keys for n in batch) == list(range(LENGTH))
    assert all(number - n // BATCH <= 3 for number, batch in enumerate(keys) for n in batch)
    check_content(got, on_host())


MODES: dict[str, dict[str, Any]] = {
    "batch size": {"batch_size": 10},
    "own sampler of batches": {"batch_sampler": [list(range(at, at + 10)) for at in range(0, LENGTH, 10)]},
    "no batches": {"batch_size": None},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lateness", [0, 3])
def test_batch_k_is_on_device_k_modulo_theirs_where_batches_overtake_each_other(
    machine: Machine, mode: str, lateness: int
) -> None:
    """The batch with number 13 is held back until others have been taken: those move up, each to the next device."""
    devices, gate = machine(3, LAZY_COPIES), threading.Event()
    data = Gated(13, gate)
    more: dict[str, Any] = {"in_order": lateness == 0, "max_lateness": lateness, **MODES[mode]}
    loader = DataLoader(data, num_workers=2, worker_kind="thread", prefetch_factor=4, device=names(devices), **more)
    if lateness == 0:
        gate.set()

    def gated() -> Iterator[Any]:
        for number, batch in enumerate(loader):
            yield batch
            if number == (14 if mode == "no batches" else 3):
                gate.set()

    numbers = [int(n) for x, *_ in consume(devices, gated()) for n in x.reshape(-1, 160)[:, 0]]
    assert sorted(numbers) == list(range(LENGTH))
    if lateness:
        assert any(n > 13 for n in numbers[: numbers.index(13)]), "nothing has overtaken it"


def _noting(loader: Any, device: FakeDevice, waited: list[tuple[str, str]]) -> Iterator[Any]:
    """The batches; who has waited until the last was handed over."""
    for batch in loader:
        waited[:] = device.waited
        yield batch


@pytest.mark.parametrize(("order", "lanes"), [*zip(ORDERS, [["cpu"], ["device"], ["cpu", "device"]], strict=True)])
def test_the_thread_that_trains_does_not(machine: Machine, order: Order, lanes: list[str]) -> None:
    (device,) = machine(1, order)
    waited: list[tuple[str, str]] = []
    check_content(consume([device], _noting(loader_on([device], lanes=lanes), device, waited)), on_host())
    assert [who for who in waited if not who[0].startswith("minato-")] == []


LAYOUT = Layout.of(PIPELINE.run({"n": 0}, 0))
assert LAYOUT is not None
BATCH_BYTES = rows_bytes(LAYOUT, BATCH)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("lanes", [["device"], ["cpu"], ["cpu", "device"]], ids="+".join)
@pytest.mark.parametrize("budget", [1, 6000, 3 * BATCH_BYTES])
def test_each_device_keeps_its_budget(machine: Machine, budget: int, lanes: list[str], in_order: bool) -> None:
    """At most the budget (or one batch) and one sample, besides the batch that its consumer has; and so it says."""
    devices = machine(2, LAZY_COPIES)
    loader = loader_on(devices, lanes=lanes, in_order=in_order, device_memory_budget=budget, prefetch_factor=8)
    assert sorted(n for batch in labels(consume(devices, loader)) for n in batch) == list(range(LENGTH))
    most = max(budget, BATCH_BYTES) + SAMPLE_BYTES
    for device, stats in zip(devices, loader.stats()["device"], strict=True):
        assert BATCH_BYTES <= stats["device_bytes_peak"] <= most
        assert device.peak <= stats["device_bytes_peak"] + BATCH_BYTES


@pytest.mark.parametrize(
    "holder",
    [
        lambda made, tensor: DeviceRow(made, 0, 0, tensor, CopyRange(0, 0, 4)),
        lambda made, tensor: Resident([], leaves={0: tensor}, made=made),
    ],
    ids=["of a load", "of a sample"],
)
def test_what_a_device_made_is_free_before_its_bytes_are_given_back(holder: Any) -> None:
    """Else another thread may take them in between, and the device holds more than its budget."""
    over: list[str] = []
    device = FakeDevice()
    made, tensor = MicroBatchOutput(None, device), torch.zeros(1)
    weakref.finalize(made, over.append, "account")
    weakref.finalize(tensor, over.append, "memory")
    held = holder(made, tensor)
    del made, tensor
    assert not over
    del held
    assert over == ["memory", "account"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("length", "count"), [(150, 2), (150, 4), (144, 3), (7, 2), (9, 3)])
def test_the_last_round(machine: Machine, workers: int, drop_last: bool, length: int, count: int) -> None:
    """With ``drop_last`` every device gets as many batches; without, all is delivered, and the last round is short."""
    devices = machine(count)
    data = torch.utils.data.Subset(Plain(), range(length))
    loader = loader_on(devices, data, num_workers=workers, drop_last=drop_last, persistent_workers=workers > 0)
    for _ in range(2):
        iterator = iter(loader)
        got = labels(consume(devices, iterator))
        assert len(got) == len(loader) == len(iterator)
        assert not drop_last or len(got) % count == 0
        whole = length // (BATCH * count) * BATCH * count
        numbers = [n for batch in got for n in batch]
        assert numbers == list(range(whole if drop_last else length))
        assert loader.stats()["samples_expected"] == loader.stats()["samples_delivered"] == len(numbers)


def test_what_an_earlier_run_has_begun_of_the_last_round_is_finished(machine: Machine) -> None:
    """One device has delivered samples of batch 16, which with four is in a round that is not whole."""
    devices, gate = machine(4), threading.Event()
    more: dict[str, Any] = {"worker_kind": "thread", "in_order": False, "max_lateness": 8, "drop_last": True}
    first = loader_on(devices[:1], Gated(13 * BATCH, gate), prefetch_factor=8, **more)
    iterator = iter(first)
    head = labels(consume(devices[:1], (next(iterator) for _ in range(16))))
    keys = [n for batch in head for n in batch]
    gate.set()
    assert 13 * BATCH not in keys and max(keys) >= 16 * BATCH
    second = loader_on(devices, Plain(), **more)
    second.load_state_dict(first.state_dict())
    tail = labels(consume(devices, second, 16))
    end = (max(keys) // BATCH + 1) * BATCH
    assert sorted(keys + [n for batch in tail for n in batch]) == list(range(end))
