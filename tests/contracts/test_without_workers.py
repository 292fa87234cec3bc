"""``num_workers=0`` keeps what PyTorch does there, and deals with what fails as a loader with workers does."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from minato_gpu import DataLoader
from tests.contracts.datasets import Made
from tests.support.raising import error_of, text_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")


def _broken(index: int) -> int:
    if index % 8 == 5:
        raise ValueError(f"sample {index} is broken")
    return index


def test_what_getitems_raises_says_where() -> None:
    """Its own error as it is, asked once, as by PyTorch; and counted."""

    class Many(Made):
        def __getitems__(self, keys: list[int]) -> list[int]:
            calls.append(keys)
            return [self.make(key) for key in keys]

    calls: list[list[int]] = []
    loader = DataLoader(Many(8, _broken), 4)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1, 2, 3]
    raised = error_of(ValueError, next, iterator)
    assert str(raised) == "sample 5 is broken"
    assert "__getitems__, epoch 0, positions 4 to 7, indices [4, 5, 6, 7]" in text_of(raised)
    assert calls == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (loader.stats()["samples_failed"], loader.stats()["samples_skipped"]) == (1, 3)


def test_samples_are_those_asked_for_whatever_getitems_returns() -> None:
    """Columns, samples left out, indices sorted in place: positions and counters are the sampler's; so is a resume."""

    class Whatever(Made):
        def __getitems__(self, keys: list[int]) -> Any:
            asked.append(list(keys))
            keys.sort()
            return {"x": torch.tensor(keys), "y": torch.tensor(keys)} if 7 in keys else keys[1:]

    asked: list[list[int]] = []
    batches = [[3, 2, 1, 0], [7, 6, 5, 4], [9, 8]]

    def loader() -> Any:
        return DataLoader(Whatever(10, int), batch_sampler=iter(batches), collate_fn=lambda batch: batch)

    first = loader()
    iterator = iter(first)
    assert next(iterator) == [1, 2, 3] and [*next(iterator)] == ["x", "y"]
    assert first.stats()["samples_delivered"] == 8
    state = first.state_dict()
    other = loader()
    other.load_state_dict(state)
    for left in iterator, iter(other):
        assert list(left) == [[9]]
    assert asked == [*batches, batches[-1]]
    assert (first.stats()["samples_delivered"], first.stats()["samples_failed"]) == (10, 0)


def test_a_second_try_says_nothing_of_the_first() -> None:
    tries = []

    def fails(index: int) -> int:
        tries.append(index)
        raise ValueError(f"try {len(tries)}")

    with pytest.raises(ValueError, match="try 2") as caught:
        next(iter(DataLoader(Made(4, fails), 2, on_error="retry")))
    assert caught.value.__context__ is None
    assert tries == [0, 0]


def test_samples_are_prepared_by_the_caller_when_their_batch_is_asked_for() -> None:
    def make(index: int) -> float:
        prepared.append(index)
        assert threading.current_thread() is threading.main_thread()
        assert get_worker_info() is None
        return float(torch.rand(()))

    def never(worker: int) -> None:
        raise AssertionError("there is no worker")

    prepared: list[int] = []
    loader = DataLoader(Made(12, make), 4, worker_init_fn=never, generator=torch.Generator())
    threads = threading.active_count()
    torch.manual_seed(7)
    iterator = iter(loader)
    assert prepared == []
    drawn = next(iterator)
    assert prepared == [0, 1, 2, 3]
    torch.manual_seed(7)
    assert drawn.tolist() == [float(torch.rand(())) for _ in range(4)], "nothing is seeded for a sample"
    assert threading.active_count() == threads


def test_a_stream_ends_with_its_iterator() -> None:
    """The loader does not hold on to it."""

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            samples = (number for number in range(12))
            opened.append(weakref.ref(samples))
            return samples

    opened: list[Any] = []
    loader = DataLoader(Stream(), 4)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1, 2, 3]
    del iterator
    assert opened[0]() is None
    assert loader.stats()["samples_delivered"] == 4
