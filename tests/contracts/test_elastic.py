"""Iterable data sets that go on with another number of workers, or of ranks: every sample comes once, and what cannot
go on is refused."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from minato_gpu import DataLoader, ShardedDataset, merge_state_dicts
from tests.contracts.cases import SHARDS
from tests.contracts.datasets import Counts
from tests.contracts.resuming import after, loader_of, through_json
from tests.contracts.test_resume_streams import Own

_KEYS = [1_000 * part + number for part, size in enumerate(SHARDS) for number in range(size)]


class Numbers:
    """Shards of whole numbers."""

    def __init__(self, sizes: tuple[int, ...] = SHARDS, *, name: str = "part") -> None:
        self.sizes, self.name = sizes, name

    def shards(self) -> list[str]:
        return [f"{self.name} {part}" for part in range(len(self.sizes))]

    def iterate(self, shard: str) -> Iterator[int]:
        part = int(shard.split()[1])
        for number in range(self.sizes[part]):
            yield 1_000 * part + number


def _loader(workers: int = 0, data: Any = None, rank: int = 0, ranks: int = 1, **more: Any) -> Any:
    dataset = ShardedDataset(data or Numbers(), num_replicas=ranks, rank=rank)
    return DataLoader(dataset, 2, num_workers=workers, generator=torch.Generator().manual_seed(5), **more)


def _keys(batches: Any) -> list[int]:
    return [int(key) for batch in batches for key in (batch[:, 0] if batch.ndim > 1 else batch)]


@pytest.mark.parametrize(("before", "now"), [*itertools.product([(1, 2), (2, 1), (2, 2), (3, 0)], repeat=2)])
def test_any_number_of_ranks(before: tuple[int, int], now: tuple[int, int]) -> None:
    """Ranks and workers of each, before and after."""
    got, states = list[Any](), []
    sizes = (9, 6, 5, 7, 8, 4, 3)
    due = [1_000 * part + number for part, size in enumerate(sizes) for number in range(size)]
    for rank in range(before[0]):
        loader = _loader(before[1], Numbers(sizes), rank, before[0])
        iterator = iter(loader)
        got += [next(iterator) for _ in range(max(1, before[1]))]
        states.append(through_json(loader.state_dict()))
        del iterator
    merged = through_json(merge_state_dicts(states))
    for rank in range(now[0]):
        resumed = _loader(now[1], Numbers(sizes), rank, now[0])
        resumed.load_state_dict(merged)
        got += resumed
    assert sorted(_keys(got)) == due


def test_another_ranks_state_is_refused() -> None:
    state = after(_loader(rank=1, ranks=2), 1)
    with pytest.raises(
        ValueError, match=r"of rank 1 of 2, and this loader's data set is rank 0 of 2; merge the states"
    ):
        _loader(ranks=2).load_state_dict(state)
    with pytest.raises(ValueError, match=r"needs one state of each of the 2 ranks, got ranks \[1\]"):
        merge_state_dicts([state])
    merged = merge_state_dicts([state, after(_loader(ranks=2), 1)])
    with pytest.raises(ValueError, match="needs one that tells its rank"):
        DataLoader(Counts([4]), 2).load_state_dict(merged)
    with pytest.raises(ValueError, match="needs one that tells its rank"):
        loader_of().load_state_dict(merged)
    other = DataLoader(ShardedDataset(Numbers(), num_replicas=2), 2, generator=torch.Generator().manual_seed(6))
    with pytest.raises(ValueError, match="have other seeds or generators"):
        merge_state_dicts([state, after(other, 1)])
    with pytest.raises(ValueError, match="rank must be one of the 2 from 0 on, got 2"):
        _loader(rank=2, ranks=2)


class _Named(Numbers):
    """Each number with the worker that has read it."""

    def iterate(self, shard: str) -> Iterator[Any]:
        for number in super().iterate(shard):
            yield torch.tensor([number, getattr(get_worker_info(), "id", 0)])


def test_the_first_worker_comes_first_where_shards_are_shared_out_anew() -> None:
    """The number of workers may be changed after a state is loaded, too."""
    loader = _loader(2, _Named())
    iterator = iter(loader)
    first = [next(iterator) for _ in range(3)]  # the second worker's turn comes next
    resumed = _loader(2, _Named())
    resumed.load_state_dict(through_json(loader.state_dict()))
    resumed.num_workers = 3
    batches = list(resumed)
    assert [int(batch[0, 1]) for batch in batches[:3]] == [0, 1, 2]
    assert sorted(_keys([*first, *batches])) == _KEYS


class Splits(Counts):
    """Shares out the numbers that are left of one stream; ``gives``: what it makes of the states."""

    def __init__(self, sizes: list[int], gives: Any = None) -> None:
        super().__init__(sizes)
        self.gives = gives

    def split_states(self, states: list[Any], workers: int) -> Any:
        return self.gives


class _OwnSplits(Own):
    def split_states(self, states: list[Any], workers: int) -> Any:
        raise AssertionError("not called")


_SIZES = [60, 60]


@pytest.mark.parametrize(
    ("dataset", "batches", "message"),
    [
        (Counts(_SIZES), 4, "their number must stay the same. It may differ for a minato_gpu.ShardedDataset"),
        (Splits(_SIZES), 1, "a worker had delivered nothing yet"),
        (Splits(_SIZES), 4, "must return a list of 3 states, got None"),
        (Splits(_SIZES, [lambda: 1] * 3), 4, "must return plain states: Can't pickle"),
        (_OwnSplits(_SIZES), 4, "those of iterators"),
    ],
    ids=["no split", "not begun", "nothing", "not plain", "iterators"],
)
def test_refused(dataset: IterableDataset[Any], batches: int, message: str) -> None:
    def make(workers: int) -> Any:
        return DataLoader(dataset, 2, num_workers=workers)

    state = after(make(2), batches)
    with pytest.raises(ValueError, match=message):
        make(3).load_state_dict(state)
    make(2).load_state_dict(state)


def test_a_state_of_some_batches_ago_is_not_split() -> None:
    def make(workers: int) -> Any:
        return DataLoader(Splits(_SIZES), 2, num_workers=workers, snapshot_every_n_steps=5)

    state = after(make(2), 6)
    with pytest.raises(ValueError, match="with snapshot_every_n_steps a stream's state is one of some batches ago"):
        make(3).load_state_dict(state)


class _Raises(Splits):
    def split_states(self, states: list[Any], workers: int) -> Any:
        raise LookupError(f"{states} for {workers}")


def test_streams_that_have_ended_are_not_split() -> None:
    """They may say that the next epoch is to begin. What ``split_states`` raises passes through."""
    loader: Any = DataLoader(_Raises([2, 40]), 2, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    while not (state := loader.state_dict())["source"]["streams"][0]["ended"]:  # that becomes known by and by
        next(iterator)
    with pytest.raises(LookupError, match=r"^\[{'epoch': 0, 'at': \d+}\] for 3$"):
        DataLoader(_Raises([]), 2, num_workers=3).load_state_dict(state)


def test_other_shards() -> None:
    state = after(_loader(), 3)
    for data, message in (
        (Numbers((*SHARDS, 3)), "of 5 shards, and shards\\(\\) now names 6"),
        (Numbers(name="section"), "of 5 shards, and shards\\(\\) now names 5, or others"),
        (Numbers((2, *SHARDS[1:])), "shard 'part 0' has fewer samples than the 6 that were delivered"),
    ):
        loader = _loader(data=data)
        loader.load_state_dict(state)
        with pytest.raises(ValueError, match=message):
            list(loader)


@pytest.mark.parametrize(
    "damage",
    [
        {"begun": [[0, 1], [0, 1]]},
        {"begun": [[5, 1]]},
        {"begun": [[0, -1]]},
        {"begun": 3},
        {"numbers": [[0, 5, 1]]},
        {"numbers": [[0, 5, 0]]},
        {"numbers": [[4, 0, -1]]},
        {"numbers": [[0, 1 << 40, 1]], "shards": [1 << 40, 1]},
        {"shards": 5},
    ],
    ids=str,
)
def test_damaged(damage: dict[str, Any]) -> None:
    """A shard that would come twice, or that is not there."""
    state = after(_loader(), 1)
    own = state["source"]["streams"][0]["state"]["state"]
    assert own["begun"] == [[0, 2]]
    damaged = copy.deepcopy(state)
    damaged["source"]["streams"][0]["state"]["state"] = {**own, **damage}
    with pytest.raises(ValueError, match="no state of a ShardedDataset, or a damaged one"):
        _loader(2).load_state_dict(damaged)
    loader = _loader()
    loader.load_state_dict(damaged)
    with pytest.raises(ValueError, match="no state of a ShardedDataset, or a damaged one"):
        iter(loader)
