"""States of all ranks merged into one, for as many ranks as before or another number; whose state a rank may take."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from minato_gpu import DataLoader, merge_state_dicts
from minato_gpu.faults.failures import TooManyFailures
from tests.contracts.datasets import Made, draw, rows
from tests.contracts.resuming import through_json
from tests.contracts.samplers import Counting

_SAMPLES = 61


def _loaders(ranks: int, data: Any = None, *, shuffle: bool = True, **more: Any) -> list[Any]:
    data = Made(_SAMPLES, draw) if data is None else data
    return [
        DataLoader(
            data,
            4,
            sampler=DistributedSampler(data, ranks, rank, shuffle, seed=3),
            num_workers=1 + rank % 2,
            generator=torch.Generator().manual_seed(5),
            **more,
        )
        for rank in range(ranks)
    ]


def _rest(loaders: list[Any], state: Any) -> list[Any]:
    """What all ranks deliver from the state on."""
    out: list[Any] = []
    for loader in loaders:
        loader.load_state_dict(through_json(state))
        out += loader
    return out


def _some(loaders: list[Any], batches: int, state: Any = None) -> tuple[list[Any], list[Any]]:
    """So many batches of each rank, and the states after them."""
    got, states = list[Any](), []
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
        iterator = iter(loader)
        got += [next(iterator) for _ in range(batches)]
        states.append(through_json(loader.state_dict()))
    return got, states


@functools.cache
def _alone() -> frozenset[Any]:
    """The samples of an uninterrupted run on one rank."""
    (alone,) = _loaders(1)
    return frozenset(tuple(map(str, sample)) for sample in rows(alone))


def _check(batches: list[Any], ranks: int) -> None:
    """Every index once, with the content of an uninterrupted run; some twice only where ranks had to be evened out.

    That is before and after a change of ``ranks`` where the last batches come before others.
    """
    samples = [tuple(map(str, sample)) for sample in rows(batches)]
    counts = Counter(sample[0] for sample in samples)
    assert set(counts) == {str(index) for index in range(_SAMPLES)}
    assert sum(counts.values()) - _SAMPLES < ranks
    assert set(samples) == _alone()


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_another_number_of_ranks(ranks: int, shuffle: bool, in_order: bool) -> None:
    for batches in (0, 5) if shuffle else (2,):
        first, states = _some(_loaders(3, shuffle=shuffle, in_order=in_order), batches)
        rest = _rest(_loaders(ranks, shuffle=shuffle, in_order=in_order), merge_state_dicts(states[::-1]))
        _check(first + rest, max(3, ranks) if in_order else 3 + ranks - 1)


def test_ranks_that_seeded_differently() -> None:
    """Another number of ranks would give samples other draws."""
    states = []
    for rank, loader in enumerate(_loaders(2)):
        loader.generator.manual_seed(rank)
        next(iter(loader))
        states.append(loader.state_dict())
    with pytest.raises(ValueError, match=r"the ranks have other seeds .* Give all ranks the same seed"):
        merge_state_dicts(states)


def test_saved_again_before_the_epoch_goes_on() -> None:
    """Every rank then has the merged state itself."""
    first, states = _some(_loaders(3), 2)
    again = merge_state_dicts(_some(_loaders(2), 0, merge_state_dicts(states))[1])
    loaders = _loaders(2)
    for loader in loaders:
        loader.load_state_dict(again)
    merged = merge_state_dicts([loader.state_dict() for loader in loaders])
    assert merged == again
    _check(first + _rest(_loaders(4), merged), 4)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batches", [0, 2])
def test_set_epoch_after_iter(batches: int, workers: int) -> None:
    """Without workers the order is drawn with the first batch, as by PyTorch; a state says of which epoch it is."""
    data: Any = range(40)

    def made() -> Any:
        return DataLoader(data, 4, sampler=DistributedSampler(data, 2, 0, seed=3), num_workers=workers)

    loader, resumed = made(), made()
    iterator = iter(loader)
    loader.sampler.set_epoch(5)
    for _ in range(batches):
        next(iterator)
    resumed.load_state_dict(loader.state_dict())
    assert torch.cat(list(resumed)).tolist() == torch.cat(list(iterator)).tolist()
    assert resumed.sampler.epoch == (0 if workers else 5)


def test_what_cannot_be_merged() -> None:
    loaders = _loaders(2)
    iterators = [iter(loader) for loader in loaders]
    for iterator in iterators:
        next(iterator)
    states = [loader.state_dict() for loader in loaders]
    with pytest.raises(ValueError, match=r"one state of each of the 2 ranks, got ranks \[0, 0\]"):
        merge_state_dicts([states[0], states[0]])
    with pytest.raises(ValueError, match=r"one state of each of the 2 ranks, got ranks \[1\]"):
        merge_state_dicts(states[1:])
    with pytest.raises(ValueError, match="got none"):
        merge_state_dicts([])
    with pytest.raises(ValueError, match="differ in 'begun'"):
        merge_state_dicts([states[0], _loaders(2)[1].state_dict()])
    with pytest.raises(ValueError, match="rank 1 of 2, and this loader's sampler is rank 0 of 2"):
        loaders[0].load_state_dict(states[1])
    with pytest.raises(ValueError, match="needs torch's DistributedSampler"):
        DataLoader(Made(_SAMPLES, draw), 4, num_workers=1).load_state_dict(merge_state_dicts(states))
    plain = [DataLoader(Made(_SAMPLES, draw), 4, num_workers=1) for _ in range(2)]
    for loader in plain:
        next(iter(loader))
    with pytest.raises(ValueError, match="every rank resumes from its own state"):
        merge_state_dicts([loader.state_dict() for loader in plain])


def _failing(ranks: int, limit: int | None = None) -> list[Any]:
    """Every fourth sample is broken."""

    def broken(index: int) -> Any:
        if index % 4 == 0:
            raise ValueError("broken")
        return torch.tensor(index)

    return _loaders(ranks, Made(48, broken), shuffle=False, on_error="skip", max_failures=limit)


def _failed(states: list[Any]) -> list[int]:
    """How many samples each rank has left out."""
    return [state["progress"].get("failed", 0) for state in states]


def test_failures_of_all_ranks() -> None:
    """Ranks share out the sum, also when their number changes once more."""
    _, states = _some(_failing(3), 2)
    assert _failed(states) == [2, 2, 2]
    state = merge_state_dicts(states)
    assert _failed(_some(_failing(3), 0, state)[1]) == [2, 2, 2]
    _, fewer = _some(_failing(2), 0, state)
    assert _failed(fewer) == [3, 3]
    assert _failed(_some(_failing(4), 0, merge_state_dicts(fewer))[1]) == [2, 2, 1, 1]
    loader, _ = _failing(2, 3)
    loader.load_state_dict(state)
    with pytest.raises(TooManyFailures, match="4 samples failed in this epoch, max_failures=3"):
        list(loader)


def _between(own: list[Any]) -> list[Any]:
    """The states of ranks, before an epoch, whose samplers have these states."""
    states = []
    for at in own:
        sampler = Counting()
        sampler.at = at
        states.append(DataLoader(Made(20, torch.tensor), 4, sampler=sampler).state_dict())
    return states


@pytest.mark.parametrize("own", [[3, 4], [[{"a": torch.ones(2)}], [{"a": torch.zeros(2)}]]], ids=["number", "nested"])
def test_states_of_samplers_that_differ_between_epochs(own: list[Any]) -> None:
    """One rank's is not given to another."""
    with pytest.raises(ValueError, match="samplers have other states; every rank resumes from its own"):
        merge_state_dicts(_between(own))
