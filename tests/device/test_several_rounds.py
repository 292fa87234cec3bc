"""The end of an epoch, where the last round may not be whole, and epochs that go on from there."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import minato_gpu.epoch.delivery
from tests.contracts.checks import NOTHING, differences
from tests.device.several import Gated, Machine, check_content, consume, labels, loader_on, on_host
from tests.support.device_batches import check_same
from tests.support.numbers import BATCH, LENGTH, Plain, Stream


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

    monkeypatch.setattr(minato_gpu.epoch.delivery, "to_device", noted)
    data = torch.utils.data.Subset(Plain(), range(length))
    loader = loader_on(devices, data, num_workers=workers, drop_last=drop_last, persistent_workers=workers > 0)
    for _ in range(2):
        iterator = iter(loader)
        batches = list(iterator)
        assert len(batches) == len(loader) == len(iterator)
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


@pytest.mark.parametrize("workers", [0, 1])
def test_no_round_of_a_stream_is_dropped(machine: Machine, workers: int) -> None:
    """Nobody knows where it ends; its length is what its data set says, or unknown, as in PyTorch."""
    loader = loader_on(machine(4), Stream(), num_workers=workers, drop_last=True)
    for unknown in (loader, iter(loader)):
        with pytest.raises(TypeError):
            len(unknown)


@pytest.mark.each_value
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("lanes", [["device"], ["cpu", "device"]], ids="+".join)
@pytest.mark.parametrize("after", [2, 3])
def test_an_epoch_goes_on_with_as_many_devices_or_others(
    machine: Machine, in_order: bool, lanes: list[str], after: int
) -> None:
    devices = machine(3, 4)
    order: dict[str, Any] = {} if in_order else {"in_order": False, "max_lateness": 4}
    for taken in (1, 18):
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
