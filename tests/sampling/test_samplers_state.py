"""What a save takes of a sampler with a state: its bytes, its time, and how often each key has come by then."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from minato_gpu import DataLoader
from minato_gpu.checkpoint import state as s
from minato_gpu.sampling.occurrences import Occurrences
from minato_gpu.sampling.samplers import Sampling
from tests.support.calls import operations_of

_KEYS = [0, 5, 5, 1, 2, 5, 3, "a", 1, 9, "a", 5, 5, 7, 8, 8, 4, 6, "b", 0, 5] * 4
_DATA: Any = range(25_600)


class Listed:
    """A sampler over a list, with a state to which ``weights`` numbers belong; counts how often it is asked for it."""

    def __init__(self, keys: Any, weights: int = 0) -> None:
        self.keys = keys
        self.at = 0
        self.weights = [0.5] * weights
        self.asked = 0

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.keys):
            self.at += 1
            yield self.keys[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"at": self.at, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.weights = state["at"], state["weights"]


class _Samples(dict[Any, int]):
    """A data set with a length, which takes any key."""

    def __len__(self) -> int:
        return 10

    def __missing__(self, key: Any) -> int:
        return 0


def _counted(source: Any) -> Counter[Any]:
    """How often each key has come, as a state says it."""
    seen = Occurrences(10, unique=False)
    planes = [(ones, s.unpacked({"bits": bits}, "bits")) for ones, bits in source["planes"]]
    seen.restore(planes, dict(source["others"]))
    return Counter({key: (seen.count([key]) or [0])[0] for key in set(_KEYS)})


@pytest.mark.parametrize("every", [1, 2, 7])
@pytest.mark.parametrize("aheads", [(0,), (2,), (0, 3, 1), (5, 0)], ids=str)
def test_counts_at_every_step(aheads: tuple[int, ...], every: int) -> None:
    """Saves of one run, forward and back: each says how often the keys have come that were delivered before it."""
    samples: Any = _Samples()
    loader: Any = DataLoader(samples, 3, sampler=Listed(_KEYS), num_workers=1, prefetch_factor=5)
    iterator = iter(loader)
    for step in range(29):
        for ahead in aheads if step % every == 0 else ():
            if ahead <= step:
                source = loader.state_dict(ahead=ahead)["source"]
                assert source["position"] == min(3 * (step - ahead), len(_KEYS))
                assert _counted(source) == Counter(_KEYS[: source["position"]])
        next(iterator, None)


@given(st.lists(st.integers(0, 20) | st.sampled_from(["a", "b"]), max_size=80), st.sampled_from([21, 24, 40]))
def test_counts_come_back(keys: list[Any], length: int) -> None:
    before = Occurrences(length, unique=False)
    before.count(keys)
    after = Occurrences(length, unique=False)
    after.restore(*before.planes())
    for key in (*range(21), "a", "b"):
        assert (after.count([key]) or [0]) == [keys.count(key)]


@pytest.mark.parametrize("plane", [(4, b""), (0, bytes(4)), (3, b"\1"), (1 << 60, b"\1")])
def test_counts_of_another_data_set(plane: Any) -> None:
    with pytest.raises(ValueError, match="data set of another length than 20"):
        Occurrences(20, unique=False).restore([plane], {})


def _window(order: Any, weights: int = 0, **more: Any) -> tuple[Any, Any]:
    """A loader of 4,096 samples in flight, and its iterator, somewhere in the middle."""
    sampler = Listed(order, weights)
    loader: Any = DataLoader(_DATA, 64, sampler=sampler, num_workers=2, prefetch_factor=32, **more)
    iterator = iter(loader)
    for _ in range(100):
        next(iterator)
        loader.state_dict()
    return loader, iterator


def test_its_size() -> None:
    """A sequence: under 1 KB besides the sampler's own; a bit for each index of one that may come to any of them."""
    for order, room in ((list(_DATA), 1024), (torch.randperm(len(_DATA)).tolist(), 1024 + len(_DATA) / 8 * 4 / 3)):
        loader, iterator = _window(order)
        for _ in range(20):
            next(iterator)
            state = loader.state_dict()
            own = {**state, "generators": {}, "global": {}, "source": {**state["source"], "state": {}}}
            assert len(json.dumps(own)) < room


def test_what_a_save_costs() -> None:
    """Of sixteen times as many samples, with sixteen times as many in flight, about the same: nothing looks at each of
    them. (benchmarks.saves says how long it takes.)"""
    costs = []
    for length, factor in ((1_600, 2), (25_600, 32)):
        data: Any = range(length)
        loader = DataLoader(data, 64, sampler=Listed(list(data)), num_workers=2, prefetch_factor=factor)
        costs.append([operations_of(loader.state_dict) for _ in zip(range(20), loader, strict=False)])
    small, large = (max(each[5:]) for each in costs)  # the first ones of an epoch have less to tell
    assert large < 2 * small


def test_copies_of_a_large_state() -> None:
    """One for every batch that is drawn while saves come, and only those are kept that may still be asked for."""
    loader, iterator = _window(list(_DATA), 20_000)
    source, sampler = loader._session.progress.source, loader.sampler
    asked = sampler.asked
    for _ in range(50):
        next(iterator)
        loader.state_dict()
    assert sampler.asked - asked <= 51
    assert sum(mark.state is not None for mark in source.marks) <= 4096 // 64 + 2
    for _ in range(100):
        next(iterator)
    asked = sampler.asked
    for _ in range(40):
        next(iterator)
    assert sampler.asked == asked


def test_samplers_that_yield_every_index_once() -> None:
    """Of those nothing is counted: torch's, and torchdata's."""
    torchdata: Any = pytest.importorskip("torchdata.stateful_dataloader.sampler")
    data: Any = range(10)

    def once(sampler: Any, name: str = "sampler") -> bool:
        arguments: Any = {name: sampler}
        return Sampling(DataLoader(data, **arguments)).yields_once

    assert once(SequentialSampler(data)) and once(RandomSampler(data))
    assert once(torchdata.RandomSampler(data)) and once(torchdata.StatefulDistributedSampler(data, 2, 0))
    assert once(torchdata.BatchSampler(torchdata.RandomSampler(data), 2, False), "batch_sampler")
    assert not once(torchdata.RandomSampler(data, num_samples=11)) and not once(list(data))
    assert not once(torchdata.RandomSampler(data, replacement=True))
    assert not once(torchdata.BatchSampler(Listed([1, 1]), 2, False), "batch_sampler")
    assert not once(DistributedSampler(data, 2, 0)), "drawn again: nothing is stored of it in any case"
    loader: Any = DataLoader(data, 2, sampler=torchdata.StatefulDistributedSampler(data, 1, 0), num_workers=1)
    iterator = iter(loader)
    next(iterator)
    assert loader.state_dict()["source"]["planes"] == []
