"""Samplers and batch samplers: any iterable, any key, read lazily in the main process."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
)

from tests.contracts.datasets import Made
from tests.torch_semantics.datasets import Numbers, as_lists, keep, numbers_in


@pytest.mark.parametrize("sampler", [[3, 0, 3, 1], range(4, -1, -2), (2, 2)], ids=str)
def test_any_iterable_is_a_sampler(loader_class: Any, num_workers: int, sampler: Any) -> None:
    loader = loader_class(Numbers(5), sampler=sampler, batch_size=2, num_workers=num_workers)
    assert numbers_in(loader) == list(sampler)
    assert numbers_in(loader) == list(sampler)
    assert loader.sampler is sampler
    assert len(loader) == (len(sampler) + 1) // 2


class Unsized:
    """A sampler that cannot tell its length, and says so in a way of its own."""

    def __iter__(self) -> Iterator[int]:
        return iter([2, 0, 1])

    def __len__(self) -> int:
        raise NotImplementedError


def test_a_sampler_whose_length_raises(loader_class: Any, num_workers: int) -> None:
    assert numbers_in(loader_class(Numbers(5), sampler=Unsized(), batch_size=2, num_workers=num_workers)) == [2, 0, 1]


def test_the_keys_of_a_batch_for_one_read(loader_class: Any, num_workers: int) -> None:
    """How PyTorch's page has a data set read a batch at once. The second epoch's are other lists."""
    sampler = BatchSampler(RandomSampler(range(300), generator=torch.Generator().manual_seed(3)), 2, False)
    data, kept = Made(300, lambda keys: torch.tensor(keys)), num_workers > 0
    loader = loader_class(data, None, sampler=sampler, num_workers=num_workers, persistent_workers=kept)
    assert len(loader) == 150
    for _ in range(2):
        batches = list(loader)
        assert [len(batch) for batch in batches] == [2] * 150
        assert sorted(torch.cat(batches).tolist()) == list(range(300))


def test_empty_batch_of_a_batch_sampler(loader_class: Any, num_workers: int) -> None:
    loader = loader_class(Numbers(3), batch_sampler=[[0], [], [2, 1]], collate_fn=keep, num_workers=num_workers)
    assert [[int(sample) for sample in batch] for batch in loader] == [[0], [], [2, 1]]


_KEYS = [np.int64(3), "name", b"raw", (1, "two"), 2.5, None, torch.tensor(4), slice(1, 3), frozenset({1})]


@pytest.mark.parametrize("key", _KEYS, ids=lambda key: type(key).__name__)
def test_keys_reach_the_data_set_unchanged(loader_class: Any, num_workers: int, key: Any) -> None:
    data = Made(1, lambda received: (type(received).__name__, repr(received)))
    loader = loader_class(data, sampler=[key], collate_fn=keep, num_workers=num_workers)
    assert list(loader) == [[(type(key).__name__, repr(key))]]


def test_batches_of_a_batch_sampler_may_be_any_iterable(loader_class: Any, num_workers: int) -> None:
    loader = loader_class(Numbers(4), batch_sampler=[(0, 1), range(2, 4)], num_workers=num_workers)
    assert as_lists(loader) == [[0, 1], [2, 3]]


class _Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(3))


def test_endless_sampler(loader_class: Any, num_workers: int) -> None:
    loader = loader_class(Numbers(3), sampler=_Endless(), batch_size=2, num_workers=num_workers)
    assert as_lists(itertools.islice(loader, 6)) == [[0, 1], [2, 0], [1, 2]] * 2
    with pytest.raises(TypeError, match="len"):
        len(loader)


def test_large_sampler(loader_class: Any) -> None:
    """PyTorch's own check: workers start although the sampler holds a great many indices."""
    loader = loader_class(Numbers(10_000_000), sampler=range(10_000_000), num_workers=1)
    assert [int(batch) for batch in itertools.islice(loader, 3)] == [0, 1, 2]


class _Recording(Sampler[int]):
    """Records in which process it runs, how often it was begun, and how far it was read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.pids: list[int] = []
        self.begun = 0
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        for index in range(self.length):
            self.pids.append(os.getpid())
            self.read += 1
            yield index

    def __len__(self) -> int:
        return self.length


def test_sampler_runs_once_per_epoch_in_the_main_process(loader_class: Any, num_workers: int) -> None:
    sampler = _Recording(8)
    loader = loader_class(Numbers(8), sampler=sampler, batch_size=2, num_workers=num_workers)
    assert sampler.begun == 0
    assert numbers_in(loader) == list(range(8))
    assert numbers_in(loader) == list(range(8))
    assert (sampler.begun, sampler.read, set(sampler.pids)) == (2, 16, {os.getpid()})


def test_sampler_is_read_lazily(loader_class: Any, num_workers: int) -> None:
    sampler = _Recording(1_000_000)
    iterator = iter(loader_class(Numbers(1_000_000), sampler=sampler, batch_size=2, num_workers=num_workers))
    assert [next(iterator).tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert sampler.read < 100_000


def test_another_loader_as_batch_sampler(loader_class: Any, num_workers: int) -> None:
    chosen: Any = loader_class([3, 1, 2, 0], batch_size=3, collate_fn=keep)
    assert as_lists(loader_class(Numbers(4), batch_sampler=chosen, num_workers=num_workers)) == [[3, 1, 2], [0]]
