"""``batch_size=None``: samples that cost next to nothing are handed over in runs, and nobody can tell."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import Dataset

from minato_gpu import DataLoader
from minato_gpu.engine import epochs
from minato_gpu.window.records import Batch

LENGTH = 700
_FORK = multiprocessing.get_context("fork")


class Made(Dataset[Any]):
    """Sample ``index`` is what a function makes of it."""

    def __init__(self, make: Callable[[int], Any], length: int = LENGTH) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


@pytest.fixture(autouse=True)
def _all_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs grow on a busy machine, too."""
    monkeypatch.setattr(epochs, "_CHEAP_S", 1e3)


def loader(make: Callable[[int], Any], **more: Any) -> DataLoader[Any]:
    return DataLoader(Made(make), **{"batch_size": None, "num_workers": 1, "multiprocessing_context": "fork", **more})


@pytest.mark.parametrize("workers", [1, 3])
def test_runs_are_taken_and_each_sample_counts_as_it_is_delivered(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    delivered = epochs.Epochs.delivered

    def noted(self: epochs.Epochs, step_s: float, batch: Batch) -> None:
        taken.append(batch.orders)
        delivered(self, step_s, batch)

    monkeypatch.setattr(epochs.Epochs, "delivered", noted)
    items = loader(str, num_workers=workers)
    for number, sample in enumerate(items):
        assert sample == str(number)
        stats = items.stats()
        assert stats["batches_delivered"] == stats["samples_delivered"] == number + 1
    assert sum(taken) == LENGTH and max(taken) > 8


def fails(index: int) -> int:
    if index % 50 == 7:
        raise KeyError(f"sample {index}")
    return index


def collates(sample: int) -> int:
    if sample % 50 == 9:
        raise ArithmeticError(f"joined {sample}")
    return -sample


@pytest.mark.parametrize("workers", [0, 2])
def test_what_fails_is_raised_in_its_place_and_takes_no_other_along(workers: int) -> None:
    context = "fork" if workers else None
    iterator = iter(loader(fails, collate_fn=collates, num_workers=workers, multiprocessing_context=context))
    for index in range(LENGTH):
        if index % 50 == 7:
            with pytest.raises(KeyError, match=f"sample {index}"):
                next(iterator)
        elif index % 50 == 9:
            with pytest.raises(ArithmeticError, match=f"joined {index}"):
                next(iterator)
        else:
            assert next(iterator) == -index
    with pytest.raises(StopIteration):
        next(iterator)


def test_a_sample_that_waits_for_the_training_loop_holds_up_none_before_it() -> None:
    had = _FORK.Semaphore(0)

    def waits(index: int) -> int:
        if index % 100 == 90:  # for all of those before it to be delivered
            for _ in range(100 if index > 100 else 90):
                assert had.acquire(timeout=60)
        return index

    for number, sample in enumerate(loader(waits)):
        assert sample == number
        had.release()
