"""Batches on a device: the same as on the host in every mode, whatever order the device runs things in."""

from __future__ import annotations

import dataclasses
import gc
import threading
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu import DataLoader, Pipeline
from minato_gpu.device.loads import Load
from minato_gpu.pipeline.pipeline import Field
from tests.support.device_batches import Fake, check_same, consume, fake, reference, seeded
from tests.support.fake_device import LAZY_CONSUMER, LAZY_COPIES, Order
from tests.support.numbers import BATCH, COSTLY, LENGTH, PIPELINE, Numbers, Plain, Stream, pad, read
from tests.support.waiting import wait_until

__all__ = ["fake"]

ORDERS: list[Order] = [LAZY_COPIES, LAZY_CONSUMER, 1, 2]
RAGGED = 77


class Ragged(Plain):
    """One sample has another shape than the others."""

    def __getitem__(self, n: int) -> Any:
        return (np.full((4, 40), n, np.float32), n, "a") if n == RAGGED else super().__getitem__(n)


SAMPLER = [n for n in range(LENGTH) if n // BATCH != RAGGED // BATCH or n == RAGGED][: RAGGED - 7]


LOADERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "the CPU lane": (Numbers(), {"pipeline": PIPELINE, "lanes": ["cpu"], "shuffle": True}),
    "the device lane": (Numbers(), {"pipeline": PIPELINE, "lanes": ["device"], "shuffle": True}),
    "both lanes": (Numbers(), {"pipeline": COSTLY, "lanes": ["cpu", "device"], "shuffle": True}),
    "joined by the user's function": (Numbers(), {"pipeline": PIPELINE, "lanes": ["cpu"], "collate_fn": pad}),
    "made by the device, joined by the user's": (
        Numbers(),
        {"pipeline": PIPELINE, "lanes": ["device"], "collate_fn": pad},
    ),
    "a small budget, so by way of the host": (
        Numbers(),
        {"pipeline": PIPELINE, "lanes": ["device"], "device_memory_budget": 6000},
    ),
    "plain, processes": (Plain(), {}),
    "plain, threads": (Plain(), {"worker_kind": "thread"}),
    "no rows, processes": (Ragged(), {"sampler": SAMPLER}),
    "no rows, threads": (Ragged(), {"sampler": SAMPLER, "worker_kind": "thread"}),
    "a stream": (Stream(), {"num_workers": 1}),
}


@cache
def on_host(name: str) -> list[list[torch.Tensor]]:
    """The same batches there."""
    dataset, more = LOADERS[name]
    more = {**more, **({"lanes": ["cpu"], "pipeline": PIPELINE} if "pipeline" in more else {})}
    more.pop("num_workers", None)
    more.pop("device_memory_budget", None)
    return reference(dataset, generator=seeded(), **more)


@pytest.mark.each_value  # a second each
@pytest.mark.usefixtures("open_from_the_start")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", LOADERS)
def test_batches_are_those_of_the_host(fake: Fake, order: Order, name: str) -> None:
    device, (dataset, more) = fake(order), LOADERS[name]
    loader = DataLoader(dataset, BATCH, device="cuda", generator=seeded(), **{"num_workers": 2, **more})
    got = consume([device], loader)
    check_same(got, on_host(name))
    stats = loader.stats()
    assert stats["device"]["batches"] == len(got)
    assert "device" not in more.get("lanes", ()) or stats["lanes"]["device"]["samples"] > 0
    del loader
    gc.collect()
    assert device.used == 0 and device.pinned == {}


def _read_unlike(fields: Any, params: Any) -> Any:
    return {**read(fields, params), "label": float(fields["n"]) if fields["n"] == 20 else fields["n"]}


def _joined_by_a_worker() -> Any:
    """One sample is unlike the others, so its batch is no rows; whoever asks for its samples is no lane."""
    read = dataclasses.replace(PIPELINE.stages[0], writes={**PIPELINE.stages[0].writes, "label": Field(object)})
    stages = (dataclasses.replace(read, cpu=_read_unlike), *PIPELINE.stages[1:])
    pipeline = Pipeline(stages, outputs=PIPELINE.outputs, name="tests")
    more: dict[str, Any] = {"pipeline": pipeline, "lanes": ["device"], "generator": seeded(), "num_workers": 1}
    return DataLoader(Numbers(), BATCH, device="cuda", timeout=60, **more)


@pytest.mark.parametrize("order", ORDERS)
def test_what_a_worker_must_join_comes_from_the_device_past_the_consumers_stream(fake: Fake, order: Order) -> None:
    device = fake(order)
    loader = _joined_by_a_worker()
    got = consume([device], loader)
    assert [int(n) for _, labels in got for n in labels] == list(range(LENGTH))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("for a copy"), RuntimeError("an illegal memory access")])
def test_what_a_device_does_not_give_up_is_prepared_by_who_joins_it(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    device, errors = fake(), [error]
    host = device.host

    def once(nbytes: int) -> torch.Tensor:
        if errors and threading.current_thread().name != "minato-device":
            raise errors.pop()
        return host(nbytes)

    monkeypatch.setattr(device, "host", once)
    loader = _joined_by_a_worker()
    got = consume([device], loader)
    assert [int(n) for _, labels in got for n in labels] == list(range(LENGTH))
    assert not errors and loader.stats()["samples_repeated"] == BATCH


def test_a_batch_that_cannot_be_handed_over_is_counted(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    device = fake()
    wait, calls = device.wait, [0]

    def fails_once(event: Any) -> None:
        calls[0] += threading.current_thread() is threading.main_thread()
        if calls[0] == 2:
            calls[0] += 1
            raise RuntimeError("an illegal memory access was encountered")
        wait(event)

    monkeypatch.setattr(device, "wait", fails_once)
    loader = DataLoader(Plain(), BATCH, num_workers=1, worker_kind="thread", device="cuda")
    batches, seen = iter(loader), []
    for number in range(len(loader)):
        if number == 1:
            with pytest.raises(RuntimeError, match=r"batch 1, positions 8 to 15\)(?s:.*)illegal memory access"):
                next(batches)
        else:
            device.read(next(batches)[1], lambda t: seen.extend(t.tolist()))
    device.finish()
    assert next(batches, None) is None
    assert seen == [n for n in range(LENGTH) if n // BATCH != 1]
    stats = loader.stats()
    assert [stats[f"samples_{name}"] for name in ("delivered", "failed", "skipped")] == [LENGTH - BATCH, 1, BATCH - 1]


def test_a_loader_that_is_collected_in_its_own_thread_is_closed(fake: Fake) -> None:
    """The garbage collector runs in any thread, also in one that closing waits for."""
    fake()
    loader: Any = DataLoader(Plain(), BATCH, num_workers=1, device="cuda", persistent_workers=True)
    next(iter(loader))
    engine = loader._session.engine
    (transfers,) = engine.assembly.loading.transfers
    done = threading.Event()

    class Collected(Load):
        def issue(self, port: Any) -> None:
            engine.close()
            done.set()

    transfers.submit(Collected(0))
    assert done.wait(60)
    assert wait_until(lambda: engine.closed and transfers._thread is None)
