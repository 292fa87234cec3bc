"""What a loader's arguments make of its device lanes."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minato_gpu import DataLoader
from minato_gpu.cache_options import CacheOptions
from minato_gpu.engine import building
from minato_gpu.options import Options
from tests.contracts.datasets import Made
from tests.leaks import descriptors_below


def plan(device: str, batch_size: int | None = 256, lanes: tuple[str, ...] = ("cpu", "device")) -> building.Plan:
    devices = (torch.device(device),)
    options = Options(0, free=False, threads=False, lanes=lanes, devices=devices, skips=False, cache=CacheOptions())
    loader = SimpleNamespace(batch_size=batch_size, pipeline="pipeline", dataset=(), batch_sampler=None)
    return building.Plan(loader, options)


@pytest.mark.parametrize(
    ("device", "batch_size", "most"),
    [("cpu", 256, 16), ("cpu", None, 16), ("cuda", 8, 16), ("cuda", 128, 32), ("cuda", 2048, 64), ("cuda", None, 16)],
)
def test_micro_batches_of_large_batches_are_larger_on_a_gpu(device: str, batch_size: int | None, most: int) -> None:
    assert plan(device, batch_size).micro_batch == most


@pytest.mark.parametrize(
    ("device", "lanes", "threads"),
    [
        ("cpu", ("cpu", "device"), 1),
        ("cpu", ("device",), 16),
        ("cuda:0", ("cpu", "device"), 4),
        ("cuda:0", ("device",), 16),
    ],
)
def test_dalis_threads(monkeypatch: pytest.MonkeyPatch, device: str, lanes: tuple[str, ...], threads: int) -> None:
    """Beside a CPU lane a GPU gets a few, for what its own engine does not decode; alone it has all cores."""
    given: list[Any] = []
    monkeypatch.setattr(building, "usable_cores", lambda: 16)
    monkeypatch.setattr(building, "DeviceLane", lambda *arguments: given.append(arguments))
    transfers: Any = SimpleNamespace(accelerator=SimpleNamespace(compute=device)) if device != "cpu" else None
    links: Any = SimpleNamespace()
    plan(device, lanes=lanes).device_lane(links, transfers, "device")
    ((_, _, compute, micro_batch, number, *_),) = given
    assert (compute, micro_batch, number) == (device, 16 if device == "cpu" else 64, threads)


@pytest.mark.usefixtures("no_leaks")
def test_where_descriptors_run_out_it_is_said_what_to_do() -> None:
    loader: Any = DataLoader(Made(8, int), 2, num_workers=2)
    told = r"Too many open files.*num_workers=2; raise the limit .* fewer workers"
    with pytest.raises(OSError, match=told) as raised, descriptors_below(3):
        iter(loader)
    assert raised.value.errno == errno.EMFILE
    assert len(list(loader)) == 4
