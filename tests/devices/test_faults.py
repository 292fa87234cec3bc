"""What goes wrong on one of several devices, or in the middle."""

from __future__ import annotations

import gc
import logging
import threading
from typing import Any

import pytest
import torch

import minato_gpu.delivery
import minato_gpu.engine.building
from minato_gpu.lanes.functions import FunctionSegment
from minato_gpu.memory import nvml
from tests.contracts.checks import NOTHING, differences
from tests.devices.several import BATCHES, Machine, consume, labels, loader_on
from tests.support.fake_device import LAZY_CONSUMER
from tests.support.numbers import BATCH, COSTLY, LENGTH, PIPELINE, Numbers, Plain


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
            assert differences(range(LENGTH), [n for batch in labels(got) for n in batch]) == NOTHING
            made = [have + loader.stats()["lanes"][f"device:{n}"]["samples"] for n, have in enumerate(made)]
            assert loader.stats()["device_lane"][1]["retired"]
    stats = loader.stats()
    assert [one["retired"] for one in stats["device_lane"]] == [False, True, False]
    assert [record.message.partition(";")[0] for record in caplog.records] == [
        "the device number 1 has no memory left to prepare samples"
    ]
    assert stats["lanes"]["device:1"]["samples"] == 0 < made[0] + made[2]


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
    monkeypatch.setattr(minato_gpu.delivery, "to_device", lambda batch, device: batch)
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
    monkeypatch.setattr(minato_gpu.engine.building, "Accelerator", lambda device: devices[:1][device.index])
    with pytest.raises(IndexError):
        iter(loader_on(devices))


def test_a_device_that_unpins_nothing_any_more_leaves_no_memory_of_the_host(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(address: int) -> None:
        asked.append(address)
        raise RuntimeError("the device is lost")

    asked: list[int] = []
    (device,) = machine(1)
    monkeypatch.setattr(device, "unpin", lost)
    loader = loader_on([device], Plain(), num_workers=1, worker_kind="thread")
    assert len(consume([device], loader)) == BATCHES
    del loader
    gc.collect()
    assert asked == list(device.pinned)


def test_figures_of_each_device(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = machine(2)
    monkeypatch.setattr(nvml, "reading", lambda uuid: {"utilisation": uuid})
    loader = loader_on(devices)
    consume(devices, loader)
    stats = loader.stats()
    assert [one["nvml"]["utilisation"] for one in stats["device"]] == ["0-uuid", "1-uuid"]
    assert len(stats["device_lane"]) == 2
