"""A machine with several fake devices."""

from __future__ import annotations

import pytest

import minato_gpu.device.accelerator
import minato_gpu.engine.builder
import minato_gpu.epoch.delivery
from minato_gpu.device.collated import mapped
from tests.device.several import Careless, Machine
from tests.support.fake_device import LAZY_COPIES, FakeDevice, Order


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, no_leaks: None) -> Machine:
    """Makes devices, and lets every loader use them as "cuda:0", "cuda:1" and so on."""

    def make(count: int = 2, order: Order = LAZY_COPIES, careless: int = -1) -> list[FakeDevice]:
        devices: list[FakeDevice] = []
        for number in range(count):
            devices.append((Careless if number == careless else FakeDevice)(order, beside=devices))
            devices[-1].uuid = f"{number}-uuid"
        monkeypatch.setattr(minato_gpu.device.accelerator, "available", lambda _: True)
        monkeypatch.setattr(minato_gpu.engine.builder, "Accelerator", lambda device: devices[device.index])
        put = lambda batch, device: mapped(batch, devices[device.index].put)  # noqa: E731
        monkeypatch.setattr(minato_gpu.epoch.delivery, "to_device", put)
        return devices

    return make
