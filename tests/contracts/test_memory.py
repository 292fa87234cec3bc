"""P4: what is in flight keeps to its budget, whatever samples become and whenever the consumer stops."""

from __future__ import annotations

import multiprocessing
from functools import partial
from typing import Any

import pytest
import torch

from minato_gpu import DataLoader
from minato_gpu.lanes.base import Task
from minato_gpu.lanes.thread_lane import ThreadLane
from tests.contracts.datasets import Made
from tests.contracts.modes import MINATO, Mode
from tests.support.waiting import wait_until

_FORK = multiprocessing.get_context("fork")
_LARGE = 100_000  # float32 numbers of a sample


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("kind", ["process", "thread"])
def test_samples_that_become_larger_do_not_add_up_beyond_the_budget(kind: str, in_order: bool) -> None:
    """Leases of many small ones have been learned when the large ones come, and wait for the workers by the dozen: what
    a worker has prepared beyond the share of one is taken off the next. In order, a worker makes its batches whole, and
    the batch that is due is made whole, too, a sample at a time, although it was small ones that room was kept for."""
    small, large, workers, batch = 100, 16_000, 2, 4
    sizes: Any = Made(600, lambda index: bytes(small if index < 400 else large))
    chosen: dict[str, Any] = {"worker_kind": kind, "in_order": in_order, "prefetch_factor": 40}
    budget = (batch + 1) * large
    loader: Any = DataLoader(sizes, batch, num_workers=workers, collate_fn=list, host_memory_budget=budget, **chosen)
    assert sum(len(samples) for samples in loader) == 600
    beyond = (workers + 1) * large * (batch if in_order else 1)
    assert loader.stats()["bytes_in_flight_peak"] <= 1.01 * (budget + beyond)


def test_workers_hear_which_of_their_leases_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker has prepared beyond its credit is taken off its next one, until it is known here."""
    ended: list[dict[int, int]] = []
    send = ThreadLane.send

    def noted(lane: ThreadLane, task: Task, worker: int = 0) -> None:
        ended.append(dict(task.ended or {}))
        send(lane, task, worker)

    monkeypatch.setattr(ThreadLane, "send", noted)
    numbers: Any = range(400)
    loader: Any = DataLoader(numbers, 4, num_workers=1, worker_kind="thread", host_memory_budget=1 << 20)
    assert sum(len(batch) for batch in loader) == 400
    assert ended[0] == {} and ended[-1] and ended[-1][0] > 0


@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_a_consumer_that_stops(mode: Mode) -> None:
    """The window fills up, and nothing beyond it is begun: 2 batches ahead for each of 2 workers."""
    begun = _FORK.Value("i", 0)

    def make(index: int) -> Any:
        with begun.get_lock():
            begun.value += 1
        return torch.full((_LARGE,), float(index))

    loader = mode.loader(Made(400, make), 4, num_workers=2, prefetch_factor=2)
    batches = iter(loader)
    for full in (4 * 5, 4 * 6, 4 * 7):
        next(batches)
        assert wait_until(partial(_reaches, begun, full))
        assert loader.stats()["bytes_in_flight_peak"] <= 1.05 * (4 * 4 + 2) * 4 * _LARGE
    assert begun.value == 4 * 7


def _reaches(begun: Any, samples: int) -> bool:
    return bool(begun.value == samples)
