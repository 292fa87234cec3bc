"""Batch number k is on device k modulo theirs, each sample once and the same, whatever the devices' streams do."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from minato_gpu import DataLoader
from tests.contracts.checks import NOTHING, differences, lateness
from tests.device.several import (
    BATCHES,
    ORDERS,
    Gated,
    Machine,
    check_content,
    consume,
    labels,
    loader_on,
    names,
    on_host,
)
from tests.support.device_batches import LANES, check_same, flat, reference, seeded
from tests.support.fake_device import LAZY_COPIES, FakeDevice, Order
from tests.support.numbers import BATCH, LENGTH, PIPELINE, Numbers, Plain
from tests.support.numbers import pad as pad_together


@pytest.mark.each_value  # every pair on one device: tests/test_device_batches.py
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


@pytest.mark.each_value  # every pair on one device: tests/test_device_batches.py
@pytest.mark.parametrize(("order", "count"), [(ORDERS[-1], 3), *((order, 2) for order in ORDERS)])
@pytest.mark.parametrize("lanes", LANES[::-1], ids="+".join)
def test_out_of_order(machine: Machine, order: Order, count: int, lanes: list[str]) -> None:
    """Exactly once, the same content, and late by no more than allowed, from whichever device samples come."""
    devices = machine(count, order)
    got = consume(devices, loader_on(devices, lanes=lanes, in_order=False, max_lateness=3))
    keys = labels(got)
    assert differences(range(LENGTH), [n for batch in keys for n in batch]) == NOTHING
    assert max(lateness(range(LENGTH), keys, BATCH)) <= 3
    check_content(got, on_host())


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("device_lanes", [["device"], ["cpu", "device"]], ids="+".join)
def test_batches_of_ones_own_sampler_and_collate_function(
    machine: Machine, device_lanes: list[str], in_order: bool
) -> None:
    devices = machine(2, 3)
    planned = [list(range(at, min(at + 5, LENGTH))) for at in range(0, LENGTH, 5)]
    more: dict[str, Any] = {"batch_sampler": planned, "collate_fn": pad_together, "lanes": device_lanes}
    arguments: dict[str, Any] = {"num_workers": 2, "pipeline": PIPELINE, "generator": seeded(), "in_order": in_order}
    loader = DataLoader(Numbers(), device=names(devices), **more, **arguments)
    got = consume(devices, loader)
    host = DataLoader(Numbers(), num_workers=1, pipeline=PIPELINE, generator=seeded(), **{**more, "lanes": ["cpu"]})
    wanted = [[tensor.clone() for tensor in flat(batch)] for batch in host]
    if in_order:
        check_same(got, wanted)
    key = lambda batch: float(batch[0][0, 0, 0])  # noqa: E731
    check_same(sorted(got, key=key), sorted(wanted, key=key))


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
    iterator = iter(loader)
    if lateness == 0:
        gate.set()
    numbers: list[int] = []
    overtaken = 14 if mode == "no batches" else 3
    for number, batch in enumerate(iterator):
        assert all(devices[number % 3].owns(tensor) for tensor in flat(batch)), f"batch {number} is on another device"
        devices[number % 3].read(batch[0], lambda t: numbers.extend(int(n) for n in t.reshape(-1, 160)[:, 0]))
        devices[number % 3].finish()
        if number == overtaken:
            gate.set()
        del batch
    assert sorted(numbers) == list(range(LENGTH))
    if lateness:
        assert any(n > 13 for n in numbers[: numbers.index(13)]), "nothing has overtaken it"


def test_a_slow_sample_delays_no_device_that_can_do_without_it(machine: Machine) -> None:
    devices, gate = machine(2, LAZY_COPIES), threading.Event()
    dataset = Gated(3, gate)
    loader = loader_on(devices, dataset, worker_kind="thread", in_order=False, max_lateness=4, prefetch_factor=4)
    iterator = iter(loader)
    first = consume(devices, (next(iterator) for _ in range(4)))
    assert 3 not in [n for batch in labels(first) for n in batch]
    gate.set()
    rest = consume(devices, iterator, first=4)
    assert differences(range(LENGTH), [n for batch in labels(first + rest) for n in batch]) == NOTHING


def test_a_missing_event_is_noticed_on_the_device_that_misses_it(machine: Machine) -> None:
    devices = machine(2, LAZY_COPIES, careless=1)
    got, wanted = consume(devices, loader_on(devices, Plain())), reference(Plain())
    right = [all(map(torch.equal, one, other)) for one, other in zip(got, wanted, strict=True)]
    assert all(right[0::2]) and not any(right[1::2])


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
