"""Several fake devices of one machine, loaders on them, and what their consumers read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch

import minato_gpu.device.accelerator
import minato_gpu.engine.builder
import minato_gpu.epoch.delivery
from minato_gpu import DataLoader
from minato_gpu.device.collated import mapped
from tests.support.device_batches import reference, seeded
from tests.support.fake_device import LAZY_CONSUMER, LAZY_COPIES, FakeDevice, Order
from tests.support.numbers import BATCH, LENGTH, PIPELINE, Numbers, Plain

ORDERS: list[Order] = [LAZY_COPIES, LAZY_CONSUMER, 1]
BATCHES = -(-LENGTH // BATCH)
SAMPLE_BYTES = 4 * 40 * 4  # of what the device makes

Machine = Callable[..., list[FakeDevice]]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, no_leaks: None) -> Machine:
    """Makes devices of one machine, and lets every loader use them as "cuda:0", "cuda:1" and so on."""

    def make(count: int = 2, order: Order = LAZY_COPIES) -> list[FakeDevice]:
        devices: list[FakeDevice] = []
        for number in range(count):
            devices.append(FakeDevice(order, beside=devices))
            devices[-1].uuid = f"{number}-uuid"
        monkeypatch.setattr(minato_gpu.device.accelerator, "available", lambda _: True)
        monkeypatch.setattr(minato_gpu.engine.builder, "Accelerator", lambda device: devices[device.index])
        put = lambda batch, device: mapped(batch, devices[device.index].put)  # noqa: E731
        monkeypatch.setattr(minato_gpu.epoch.delivery, "to_device", put)
        return devices

    return make


def names(devices: Sequence[FakeDevice]) -> list[str]:
    return [f"cuda:{number}" for number in range(len(devices))]


def labels(seen: Sequence[Sequence[torch.Tensor]]) -> list[list[int]]:
    return [[int(n) for n in tensors[1]] for tensors in seen]


def loader_on(devices: Sequence[FakeDevice], dataset: Any = None, **more: Any) -> Any:
    """A loader over the numbers and their pipeline, if nothing else is said."""
    given: dict[str, Any] = {"num_workers": 2, "generator": seeded()}
    if dataset is None:
        given["pipeline"] = PIPELINE
    return DataLoader(Numbers() if dataset is None else dataset, BATCH, **{**given, "device": names(devices), **more})


@cache
def on_host(**more: Any) -> list[list[torch.Tensor]]:
    return reference(Numbers(), pipeline=PIPELINE, generator=seeded(), lanes=["cpu"], **more)


def check_content(got: Sequence[Sequence[torch.Tensor]], wanted: Sequence[Sequence[torch.Tensor]]) -> None:
    """Each sample is what it is on the host, in whichever batch."""
    by_label = {int(n): x for x, numbers in wanted for x, n in zip(x, numbers, strict=True)}
    for x, numbers in got:
        assert all(torch.allclose(a, by_label[int(n)], atol=1e-6) for a, n in zip(x, numbers, strict=True))


class Gated(Plain):
    """One sample waits for a gate."""

    def __init__(self, at: int, gate: threading.Event) -> None:
        self.at, self.gate = at, gate

    def __getitem__(self, n: int) -> Any:
        if n == self.at:
            assert self.gate.wait(60)
        return super().__getitem__(n)
