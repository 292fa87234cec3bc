"""P4 and batches that belong to the consumer: budgets, and views that nobody changes afterwards."""

from __future__ import annotations

import gc
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu import DataLoader
from tests.contracts.checks import NOTHING, differences
from tests.contracts.datasets import Made
from tests.contracts.modes import EVERY, MINATO, Mode

_WIDTH = 1000
_SAMPLE_BYTES = 4 * _WIDTH


def _row(index: int) -> torch.Tensor:
    return torch.full((_WIDTH,), float(index))


def _uneven(index: int) -> Any:
    """What cannot be stacked: tensors of different lengths, with a text."""
    return {"text": str(index), "tensor": torch.full((index % 5 + 1,), float(index))}


def _peak_allowed(budget: int, slots: int) -> float:
    """P4: the budget, or the one batch that must be whole to be delivered, and a sample per slot; 5 % for wrapping."""
    return 1.05 * (max(budget, 4 * _SAMPLE_BYTES) + slots * _SAMPLE_BYTES)


def _index_of(row: torch.Tensor) -> int:
    assert bool((row == row[0]).all()), "the row was torn or overwritten"
    return int(row[0])


@pytest.mark.parametrize("budget", [8 * _SAMPLE_BYTES, 1])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_a_list_of_all_batches_under_a_tiny_budget(mode: Mode, workers: int, budget: int) -> None:
    """Two batches, and one byte: everything arrives, unchanged, because delivered batches leave the budget."""
    loader = mode.loader(Made(60, _row), 4, num_workers=workers, host_memory_budget=budget)
    batches = list(loader)
    assert differences(range(60), [_index_of(row) for batch in batches for row in batch]) == NOTHING
    assert loader.stats()["bytes_in_flight_peak"] <= _peak_allowed(budget, max(1, workers))
    assert loader.stats()["bytes_in_flight"] == 0


@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_a_tiny_budget_and_samples_that_cannot_be_stacked(mode: Mode) -> None:
    loader = mode.loader(Made(60, _uneven), 4, num_workers=2, host_memory_budget=100, collate_fn=list)
    received = [sample for batch in loader for sample in batch]
    assert differences(map(str, range(60)), [sample["text"] for sample in received]) == NOTHING
    assert all(_index_of(sample["tensor"]) == int(sample["text"]) for sample in received)


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
def test_memory_of_dropped_batches_is_used_again(mode: Mode) -> None:
    """A long epoch under a small budget, one batch alive at a time: the peak does not grow with the epoch."""
    budget = 16 * _SAMPLE_BYTES
    loader = mode.loader(Made(1000, _row), 4, num_workers=2, host_memory_budget=budget)
    peaks = []
    for number, batch in enumerate(loader):
        assert len(batch) == 4
        if number % 50 == 49:
            peaks.append(loader.stats()["bytes_in_flight_peak"])
    assert peaks and max(peaks) <= _peak_allowed(budget, 2)


@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_samples_of_growing_size(mode: Mode) -> None:
    """The first sample says nothing about the size of those to come."""
    loader = mode.loader(Made(30, lambda index: torch.full((1 + index * 5000,), float(index))), None, num_workers=2)
    received = [(_index_of(sample), len(sample)) for sample in loader]
    assert sorted(received) == [(index, 1 + index * 5000) for index in range(30)]


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
