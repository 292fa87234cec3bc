"""One process that drives several devices: batch number k is on device k modulo theirs, whatever their streams do."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import minato_gpu.building
import minato_gpu.loader
import minato_gpu.memory.accelerator
from minato_gpu import DataLoader
from minato_gpu.lanes.functions import FunctionSegment
from minato_gpu.memory import nvml
from minato_gpu.scheduling import replay
from tests.contracts.checks import NOTHING, differences, lateness
from tests.fake_device import LAZY_CONSUMER, LAZY_COPIES, FakeDevice, Order
from tests.test_device_batches import (
    BATCH,
    COSTLY,
    LANES,
    LENGTH,
    PIPELINE,
    Numbers,
    Plain,
    Stream,
    check_same,
    flat,
    reference,
    seeded,
)
from tests.test_device_batches import pad as pad_together

ORDERS: list[Order] = [LAZY_COPIES, LAZY_CONSUMER, 1]
BATCHES = -(-LENGTH // BATCH)

Machine = Callable[..., list[FakeDevice]]


class Careless(FakeDevice):
    """The consumer's stream waits for nothing."""

    def wait(self, event: Any) -> None:
        if self.current is not self.consumer:
            super().wait(event)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, no_leaks: None) -> Machine:
    """Makes devices, and lets every loader use them as "cuda:0", "cuda:1" and so on."""

    def make(count: int = 2, order: Order = LAZY_COPIES, careless: int = -1) -> list[FakeDevice]:
        devices: list[FakeDevice] = []
        for number in range(count):
            devices.append((Careless if number == careless else FakeDevice)(order, beside=devices))
            devices[-1].uuid = f"{number}-uuid"
        monkeypatch.setattr(minato_gpu.memory.accelerator, "available", lambda _: True)
        monkeypatch.setattr(minato_gpu.building, "open_accelerator", lambda device: devices[device.index])
        return devices

    return make


def names(devices: Sequence[FakeDevice]) -> list[str]:
    return [f"cuda:{number}" for number in range(len(devices))]


def consume(devices: Sequence[FakeDevice], batches: Any, first: int = 0) -> list[list[torch.Tensor]]:
    """What the consumer of each batch's own device reads of it; ``first``: the number of the first batch."""
    seen: list[list[torch.Tensor]] = []
    for number, batch in enumerate(batches, first):
        found: list[torch.Tensor] = []
        seen.append(found)
        device = devices[number % len(devices)]
        for tensor in flat(batch):
            assert device.owns(tensor), f"batch {number} is on another device"
            device.read(tensor, lambda t, into=found: into.append(t.clone()))  # type: ignore[misc]
    for device in devices:
        device.finish()
    return seen


def labels(seen: Sequence[Sequence[torch.Tensor]]) -> list[list[int]]:
    return [[int(n) for n in tensors[1]] for tensors in seen]


def loader_on(devices: Sequence[FakeDevice], dataset: Any = None, **more: Any) -> Any:
    """A loader over the numbers and their pipeline, if nothing else is said."""
    given: dict[str, Any] = {"num_workers": 2, "generator": seeded()}
    if dataset is None:
        given["pipeline"] = PIPELINE
    return DataLoader(Numbers() if dataset is None else dataset, BATCH, **{**given, "device": names(devices), **more})


def on_host(**more: Any) -> list[list[torch.Tensor]]:
    return reference(Numbers(), pipeline=PIPELINE, generator=seeded(), lanes=["cpu"], **more)


def check_content(got: Sequence[Sequence[torch.Tensor]], wanted: Sequence[Sequence[torch.Tensor]]) -> None:
    """Each sample is what it is on the host, in whichever batch."""
    by_label = {int(n): x for x, numbers in wanted for x, n in zip(x, numbers, strict=True)}
    for x, numbers in got:
        assert all(torch.allclose(a, by_label[int(n)], atol=1e-6) for a, n in zip(x, numbers, strict=True))


# --- the promises -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("lanes", LANES, ids="+".join)
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


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("lanes", LANES, ids="+".join)
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


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_plain_data_set_and_one_that_workers_iterate(machine: Machine, kind: str) -> None:
    devices = machine(3, LAZY_CONSUMER)
    check_same(consume(devices, loader_on(devices, Plain(), worker_kind=kind)), reference(Plain()))
    streamed = loader_on(devices, Stream(), num_workers=1, worker_kind=kind)
    check_same(consume(devices, streamed), reference(Stream()))


@pytest.mark.parametrize("in_order", [True, False])
def test_each_device_keeps_its_budget(machine: Machine, in_order: bool) -> None:
    """At most the budget, one batch beyond it, and what each of two micro-batches has just made."""
    devices, budget = machine(2, LAZY_COPIES), 6000
    loader = loader_on(devices, lanes=["device"], in_order=in_order, device_memory_budget=budget)
    assert differences(range(LENGTH), [n for b in labels(consume(devices, loader)) for n in b]) == NOTHING
    batch = BATCH * (4 * 40 * 4 + 8)
    for stats in loader.stats()["device"]:
        assert 0 < stats["device_bytes_peak"] <= budget + batch


class Gated(Plain):
    """One sample waits for a gate."""

    def __init__(self, at: int, gate: threading.Event) -> None:
        self.at, self.gate = at, gate

    def __getitem__(self, n: int) -> Any:
        if n == self.at:
            assert self.gate.wait(20)
        return super().__getitem__(n)


def test_a_small_budget_does_not_stop_where_a_later_batch_is_ready_first(machine: Machine) -> None:
    """Its device has room for one batch, and the first to be complete is not the first to be delivered."""
    devices, gate = machine(2, LAZY_COPIES), threading.Event()
    loader = loader_on(devices, Gated(3, gate), worker_kind="thread", device_memory_budget=1, prefetch_factor=3)
    iterator = iter(loader)
    transfers = loader._shown._assembly.loading.transfers
    threading.Timer(0.2, gate.set).start()
    check_same(consume(devices, iterator), reference(Plain()))
    assert all(one.budget.held["batches"] == 0 for one in transfers)


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


def test_what_was_recorded_replays(machine: Machine, tmp_path: Path) -> None:
    devices = machine(2)
    loader = loader_on(devices)
    loader.record_events(tmp_path / "log.jsonl")
    consume(devices, loader)
    del loader
    gc.collect()
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert replay.verify(lines) > 50
    assert any('"lane": "device:1"' in line for line in lines)


# --- the end of an epoch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("length", "count"), [(150, 2), (150, 4), (144, 3), (7, 2), (9, 3)])
def test_the_last_round(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, workers: int, drop_last: bool, length: int, count: int
) -> None:
    """With ``drop_last`` every device gets as many batches; without, all is delivered, and the last round is short."""
    devices = machine(count)
    used: list[int] = []

    def noted(batch: Any, device: torch.device) -> Any:
        used.append(device.index)
        return batch

    monkeypatch.setattr(minato_gpu.loader, "to_device", noted)
    data = torch.utils.data.Subset(Plain(), range(length))
    loader = loader_on(devices, data, num_workers=workers, drop_last=drop_last, persistent_workers=workers > 0)
    for _ in range(2):
        batches = list(loader)
        assert len(batches) == len(loader)
        numbers = [int(n) for batch in batches for n in batch[1]] if workers == 0 else []
        if workers == 0:
            assert used == [number % count for number in range(len(batches))]
            used.clear()
        for number, batch in enumerate(batches if workers else []):
            devices[number % count].read(batch[1], lambda t, into=numbers: into.extend(t.tolist()))  # type: ignore[misc]
            devices[number % count].finish()
        if drop_last:
            whole = length // (BATCH * count) * BATCH * count
            assert numbers == list(range(whole))
            assert len(batches) % count == 0
        else:
            assert numbers == list(range(length))
        assert loader.stats()["samples_expected"] == loader.stats()["samples_delivered"] == len(numbers)
        del batches


@pytest.mark.parametrize("order", ["shuffled", "stateful", "unknown"])
def test_a_last_round_that_is_dropped_is_no_harm_to_a_resume(machine: Machine, order: str) -> None:
    """150 samples are 18 whole batches, which are 4 whole rounds of four; batches drawn ahead are not lost."""
    devices = machine(4)

    def make() -> Any:
        more: dict[str, Any] = {"sampler": {"shuffled": None, "stateful": Stateful(), "unknown": Unknown()}[order]}
        return loader_on(devices, drop_last=True, lanes=["cpu"], shuffle=order == "shuffled" or None, **more)

    whole = consume(devices, make())
    assert len(whole) == 16
    for taken in (1, 4, 6, 15, 16):
        first = make()
        iterator = iter(first)
        consume(devices, (next(iterator) for _ in range(taken)))
        state = first.state_dict()
        second = make()
        second.load_state_dict(state)
        check_same(consume(devices, second, taken), whole[taken:])


class Unknown:
    """A sampler of which nothing is known."""

    def __iter__(self) -> Any:
        return iter([(7 * n) % LENGTH for n in range(LENGTH)])

    def __len__(self) -> int:
        return LENGTH


class Stateful(Unknown):
    """One whose iterator has a state."""

    def __iter__(self) -> Any:
        return Counting()


class Counting:
    """Counts what it has yielded."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        if self.at >= LENGTH:
            raise StopIteration
        self.at += 1
        return (7 * self.at) % LENGTH

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


# --- saving and resuming ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("lanes", [["device"], ["cpu", "device"]], ids="+".join)
@pytest.mark.parametrize("after", [2, 3])
def test_an_epoch_goes_on_with_as_many_devices_or_others(
    machine: Machine, in_order: bool, lanes: list[str], after: int
) -> None:
    devices = machine(3, 4)
    order: dict[str, Any] = {} if in_order else {"in_order": False, "max_lateness": 4}
    for taken in (1, 5, 18):
        first = loader_on(devices[:2], shuffle=True, lanes=lanes, persistent_workers=True, **order)
        iterator = iter(first)
        head = consume(devices[:2], (next(iterator) for _ in range(taken)))
        state = first.state_dict()
        second = loader_on(devices[:after], shuffle=True, lanes=lanes, **order)
        second.load_state_dict(state)
        tail = consume(devices[:after], second, taken)
        wanted = on_host(shuffle=True)
        if in_order:
            check_same(head + tail, wanted)
        keys = [n for batch in labels(head + tail) for n in batch]
        assert differences(range(LENGTH), keys) == NOTHING
        check_content(head + tail, wanted)


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
    assert differences(range(end), keys + [n for batch in tail for n in batch]) == NOTHING


# --- what goes wrong --------------------------------------------------------------------------------------------


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
        without = 0
        for _ in range(30):  # out of order it may have to wait for work on a busy machine
            got = consume(devices, loader)
            assert differences(range(LENGTH), [n for batch in labels(got) for n in batch]) == NOTHING
            made = [have + loader.stats()["lanes"][f"device:{n}"]["samples"] for n, have in enumerate(made)]
            without += loader.stats()["device_lane"][1]["retired"]
            if without == 3:  # it retired in the first of these, and may have begun with the second by then
                break
    stats = loader.stats()
    assert [one["retired"] for one in stats["device_lane"]] == [False, True, False]
    assert [record.message.partition(";")[0] for record in caplog.records] == [
        "the device number 1 has no memory left to prepare samples"
    ]
    assert stats["lanes"]["device:1"]["samples"] == 0 < made[0] + made[2]


def test_a_missing_event_is_noticed_on_the_device_that_misses_it(machine: Machine) -> None:
    devices = machine(2, LAZY_COPIES, careless=1)
    got, wanted = consume(devices, loader_on(devices, Plain())), reference(Plain())
    right = [all(map(torch.equal, one, other)) for one, other in zip(got, wanted, strict=True)]
    assert all(right[0::2]) and not any(right[1::2])


class Broken(Numbers):
    """Two batches of the numbers cannot be read."""

    def __getitem__(self, n: int) -> Any:
        if n // BATCH in (4, 7):
            raise ValueError(f"number {n} cannot be read")
        return super().__getitem__(n)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_loses_all_its_samples_keeps_its_devices_turn(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    devices = machine(2)
    monkeypatch.setattr(minato_gpu.loader, "to_device", lambda batch, device: batch)
    lanes = ["cpu"] if workers == 0 else None
    loader = loader_on(devices, Broken(), pipeline=PIPELINE, num_workers=workers, on_error="skip", lanes=lanes)
    if workers == 0:
        keys = [[int(n) for n in batch["label"]] for batch in loader]
    else:
        keys = labels(consume(devices, loader))
    assert len(keys) == BATCHES and [len(keys[at]) for at in (4, 7)] == [1, 1]
    good = [n for n in range(LENGTH) if n // BATCH not in (4, 7)]
    assert differences(good, [n for at, batch in enumerate(keys) for n in batch if at not in (4, 7)]) == NOTHING
    assert loader.stats()["samples_padded"] == 2


class BadBeginning(Numbers):
    """Its first three batches cannot be read."""

    def __getitem__(self, n: int) -> Any:
        if n < 3 * BATCH:
            raise ValueError(f"number {n} cannot be read")
        return super().__getitem__(n)


@pytest.mark.parametrize("count", [1, 2])
def test_a_budget_does_not_hold_back_what_is_repeated_for_lost_batches(machine: Machine, count: int) -> None:
    """The first good sample is in a batch that the budget does not let onto its device yet."""
    devices = machine(count)
    loader = loader_on(
        devices, BadBeginning(), pipeline=PIPELINE, on_error="skip", lanes=["cpu"], device_memory_budget=1, timeout=20
    )
    keys = labels(consume(devices, loader))
    padded = 3 if count > 1 else 0
    assert [len(batch) for batch in keys[:padded]] == [1] * padded
    good = range(3 * BATCH, LENGTH)
    assert differences(good, [n for batch in keys[padded:] for n in batch]) == NOTHING


def test_leaving_in_the_middle_leaves_nothing_on_any_device(machine: Machine) -> None:
    devices = machine(3, LAZY_CONSUMER)
    loader = loader_on(devices, persistent_workers=True, in_order=False)
    for _ in range(3):
        for number, _batch in enumerate(loader):
            if number == 4:
                break
    del _batch
    assert differences(range(LENGTH), [n for b in labels(consume(devices, loader)) for n in b]) == NOTHING
    del loader
    gc.collect()
    for device in devices:
        device.finish()
    assert all(device.used == 0 and device.pinned == {} for device in devices)


def test_one_device_that_cannot_be_opened_leaves_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = machine(2)
    monkeypatch.setattr(minato_gpu.building, "open_accelerator", lambda device: devices[:1][device.index])
    with pytest.raises(IndexError):
        iter(loader_on(devices))


def test_figures_of_each_device(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = machine(2)
    monkeypatch.setattr(nvml, "reading", lambda uuid: {"utilisation": uuid})
    loader = loader_on(devices)
    consume(devices, loader)
    stats = loader.stats()
    assert [one["nvml"]["utilisation"] for one in stats["device"]] == ["0-uuid", "1-uuid"]
    assert len(stats["device_lane"]) == 2


def test_one_device_twice_has_two_executors(machine: Machine) -> None:
    devices = machine(1)
    loader = loader_on(devices, device=["cuda:0", "cuda:0"], lanes=["device"])
    check_same(consume(devices, loader), on_host())
    assert [loader.stats()["lanes"][f"device:{n}"]["samples"] > 0 for n in range(2)] == [True, True]


def test_a_sequence_of_one_is_that_device(machine: Machine) -> None:
    devices = machine(1)
    loader = loader_on(devices, drop_last=True)
    assert len(consume(devices, loader)) == LENGTH // BATCH
    assert loader.stats()["device"]["batches"] == LENGTH // BATCH
