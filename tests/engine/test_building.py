"""What a loader's arguments make of its device lanes."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minato_gpu import DataLoader, Source, read_bytes
from minato_gpu.cache_options import CacheOptions
from minato_gpu.engine import building
from minato_gpu.options import Options
from tests.contracts.datasets import Made
from tests.support.leaks import descriptors_below


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


class _Kept(Made):
    """Its bytes are read ahead."""

    def source(self, index: int) -> Source:
        return Source(__file__)

    def __getitem__(self, index: int) -> Any:
        read_bytes(self.source(index))
        return index


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [(Made, {}), (Made, {"worker_kind": "thread"}), (_Kept, {})],
    ids=["process", "thread", "source"],
)
def test_where_descriptors_run_out_it_is_said_what_to_do(kind: type[Made], arguments: dict[str, Any]) -> None:
    """Whichever is the first that cannot be had, none stays open (but for two pipes that CPython's own fork leaves)."""
    loader: Any = DataLoader(kind(8, int), 2, num_workers=2, **arguments)
    list(loader)  # what is made once is there
    before, told = _opened(), dict[str, int | None]()
    for limit in range(3, 1000):
        try:
            with descriptors_below(limit):
                iterator = iter(loader)
            break
        except OSError as error:
            told[str(error)] = error.errno
        gc.collect()
        stay = _opened().items() - before.items()
        for number, link in list(stay):
            if link.startswith("pipe:"):
                os.close(number)
                stay.remove((number, link))
        assert not stay
    assert len(list(iterator)) == 4
    ((text, code),) = told.items()
    assert code == errno.EMFILE
    assert "Too many open files: raise the limit (`ulimit -n`" in text
    assert ("num_workers=2 worker processes" in text) == (not arguments)


def _opened() -> dict[int, str]:
    """What this process has open, by number."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder itself
            found[int(entry.name)] = str(entry.readlink())
    return found
