"""P4 and batches that belong to the consumer: budgets, and views that nobody changes afterwards."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu import DataLoader
from minato_gpu.lanes.base import Task
from minato_gpu.lanes.thread_lane import ThreadLane
from tests.contracts.checks import NOTHING, differences
from tests.contracts.datasets import Made
from tests.contracts.modes import EVERY, MINATO, Mode
from tests.support.waiting import wait_until

_FORK = multiprocessing.get_context("fork")
_WIDTH = 1000
_SMALL, _LARGE, _HUGE = 100, 100_000, 1_000_000  # float32 numbers of a sample
_BUDGET = 6 * _LARGE  # bytes: one and a half large samples


def _row(index: int) -> torch.Tensor:
    return torch.full((_WIDTH,), float(index))


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


def _size(index: int) -> int:
    return _HUGE if index == 17 else _LARGE if index % 10 == 3 else _SMALL


@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_sizes_that_vary_ten_thousand_times(mode: Mode) -> None:
    """One sample is larger than the whole budget: it passes. Else the budget and a sample per slot are the most."""
    data = Made(60, lambda index: torch.full((_size(index),), float(index)))
    loader = mode.loader(data, None, num_workers=2, host_memory_budget=_BUDGET)
    received = []
    for sample in loader:
        assert bool((sample == sample[0]).all())
        received.append((int(sample[0]), len(sample)))
    assert differences([(index, _size(index)) for index in range(60)], received) == NOTHING
    assert loader.stats()["bytes_in_flight_peak"] <= 1.05 * (_BUDGET + 4 * (_HUGE + _LARGE))
    assert loader.stats()["bytes_in_flight"] == 0


def _values(view: Any) -> Any:
    """A view's numbers as an array that shares its memory."""
    return view.numpy() if isinstance(view, torch.Tensor) else np.asarray(view)


@pytest.mark.parametrize("mode", EVERY, ids=lambda mode: mode.name)
def test_old_batches_stay_as_they_were(mode: Mode) -> None:
    """Views of every kind, kept over two further epochs, after the batches themselves and the loader are gone."""
    loader = mode.loader(Made(40, _row), 4, num_workers=2, persistent_workers=True)
    kept: list[tuple[Any, Any]] = []
    for number, batch in enumerate(loader):
        view: Any = (batch[1], batch[:, 3:7], batch.numpy()[2], batch.t(), memoryview(batch.numpy()))[number % 5]
        kept.append((view, _values(view).copy()))
    del batch, view
    for _ in range(2):
        for batch in loader:
            batch.add_(1000.0)
    del batch, loader
    gc.collect()
    assert len(kept) == 10
    assert all(np.array_equal(_values(view), copy) for view, copy in kept)


def _index_of(row: torch.Tensor) -> int:
    assert bool((row == row[0]).all()), "the row was torn or overwritten"
    return int(row[0])


@pytest.mark.parametrize("mode", EVERY, ids=lambda mode: mode.name)
def test_changing_a_batch_changes_no_other(mode: Mode) -> None:
    loader = mode.loader(Made(40, _row), 4, num_workers=2)
    received = []
    for batch in loader:
        received += [_index_of(row) for row in batch]
        batch.fill_(-1.0)
    assert differences(range(40), received) == NOTHING


@pytest.mark.parametrize("mode", EVERY, ids=lambda mode: mode.name)
def test_batches_can_be_pickled_and_cloned_after_the_loader_has_gone(mode: Mode) -> None:
    batches = list(mode.loader(Made(12, _row), 4, num_workers=2))
    gc.collect()
    copies = [pickle.loads(pickle.dumps(batch)) for batch in batches]
    assert all(
        torch.equal(batch, copy) and torch.equal(batch.clone(), copy)
        for batch, copy in zip(batches, copies, strict=True)
    )


@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_changing_dtypes_and_shapes_between_batches(mode: Mode) -> None:
    """A layout learnt from the first batches must not be forced on later ones."""

    def make(index: int) -> Any:
        if index < 12:
            return torch.full((3,), index, dtype=torch.int64)
        if index < 24:
            return torch.full((3,), index + 0.5, dtype=torch.float64)
        return {"now": "a dict", "value": index}

    def summary(batch: Any) -> list[Any]:
        if isinstance(batch, dict):
            return [(int(value), "dict") for value in batch["value"]]
        return [(int(row[0]), str(batch.dtype)) for row in batch]

    planned = [list(range(start, start + 4)) for start in range(0, 36, 4)]
    loader = mode.loader(Made(36, make), batch_sampler=planned, num_workers=2)
    received = list(itertools.chain.from_iterable(map(summary, loader)))
    expected = [(i, "torch.int64" if i < 12 else "torch.float64" if i < 24 else "dict") for i in range(36)]
    assert differences(expected, received) == NOTHING
