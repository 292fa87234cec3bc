"""Batches on a fake device: what a consumer's stream reads of them, and the same batches on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import minato_gpu.device.accelerator
import minato_gpu.engine.builder
from minato_gpu import DataLoader
from tests.support.fake_device import LAZY_COPIES, FakeDevice, Order
from tests.support.numbers import BATCH

Fake = Callable[..., FakeDevice]
LANES = [["cpu"], ["device"], ["cpu", "device"]]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, no_leaks: None) -> Fake:
    """Makes a device, and lets every loader with ``device="cuda"`` use it."""

    def make(order: Order = LAZY_COPIES, **more: Any) -> FakeDevice:
        device = FakeDevice(order, **more)
        monkeypatch.setattr(minato_gpu.device.accelerator, "available", lambda _: True)
        monkeypatch.setattr(minato_gpu.engine.builder, "Accelerator", lambda _: device)
        return device

    return make


def flat(batch: Any) -> list[torch.Tensor]:
    """All tensors of a batch, in order."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    return [tensor for part in parts for tensor in flat(part)]


def consume(devices: Sequence[FakeDevice], batches: Any, first: int = 0) -> list[list[torch.Tensor]]:
    """What the consumer's stream on each batch's own device reads of it; no batch is kept. ``first``: the first one's
    number."""
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


def reference(dataset: Any, **more: Any) -> list[list[torch.Tensor]]:
    """The same batches on the host."""
    return [[tensor.clone() for tensor in flat(batch)] for batch in DataLoader(dataset, BATCH, num_workers=1, **more)]


def check_same(got: list[list[torch.Tensor]], wanted: list[list[torch.Tensor]]) -> None:
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert [(t.dtype, t.shape) for t in one] == [(t.dtype, t.shape) for t in other]
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one, other, strict=True))


def seeded() -> Any:
    return torch.Generator().manual_seed(5)
