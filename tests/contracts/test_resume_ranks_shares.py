"""Which rank a state is of, as its sampler tells or cannot tell, and what of one rank's state another may take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

from minato_gpu import DataLoader, merge_state_dicts
from tests.contracts.datasets import Made
from tests.contracts.resuming import through_json
from tests.contracts.samplers import Counting


class _Heir(DistributedSampler[int]):
    pass


class _Batches:
    """A batch sampler of one's own over a sampler that has a rank's share."""

    def __init__(self, data: Any, ranks: int, rank: int) -> None:
        self.sampler: Any = DistributedSampler(data, ranks, rank)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(BatchSampler(self.sampler, 4, drop_last=False))


class _Tells:
    """A sampler of one's own that tells its share, in whatever numbers it was given."""

    def __init__(self, ranks: Any, rank: Any) -> None:
        self.num_replicas, self.rank = ranks, rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 40, self.num_replicas))


def _share_of(kind: str, ranks: int, rank: int) -> Any:
    data: Any = range(40)
    if kind == "numpy":
        return DataLoader(data, 4, sampler=_Tells(np.int64(ranks), np.int32(rank)))
    if kind == "batches":
        return DataLoader(data, batch_sampler=_Batches(data, ranks, rank))
    if kind == "torchdata":
        made: Any = pytest.importorskip("torchdata.stateful_dataloader.sampler").StatefulDistributedSampler
    else:
        made = _Heir
    return DataLoader(data, 4, sampler=made(data, ranks, rank))


class _Groups:
    """A sampler that asks a process group, which is not there, for all that it tells."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(40))

    def _asked(self) -> Any:
        raise ValueError("Default process group has not been initialized")

    rank = num_replicas = sampler = batch_sampler = generator = epoch = property(_asked)


def test_samplers_that_cannot_tell_their_share() -> None:
    """They are as those that do not tell it."""
    data: Any = range(40)
    made = [DataLoader[Any](data, 4, sampler=_Groups()) for _ in range(2)]
    made[1].load_state_dict(made[0].state_dict())
    iterator = iter(made[0])
    next(iterator)
    state = made[0].state_dict()
    made[1].load_state_dict(through_json(state))
    assert state["source"]["rank"] is None
    assert torch.cat(list(made[1])).tolist() == torch.cat(list(iterator)).tolist()


@pytest.mark.parametrize("kind", ["heir", "torchdata", "batches", "numpy"])
def test_another_ranks_state_is_refused(kind: str) -> None:
    """Keys that are stored are those of the rank that saved them."""
    loader = _share_of(kind, 2, 0)
    iterator = iter(loader)
    next(iterator)
    state = through_json(loader.state_dict())
    for ranks, rank in ((2, 1), (3, 0)):
        other = _share_of(kind, ranks, rank)
        with pytest.raises(
            ValueError, match=f"rank 0 of 2, .* rank {rank} of {ranks}; every rank resumes from its own"
        ):
            other.load_state_dict(state)
    again = _share_of(kind, 2, 0)
    again.load_state_dict(state)
    assert torch.cat(list(again)).tolist() == torch.cat(list(iterator)).tolist()


def _between(own: list[Any]) -> list[Any]:
    """The states of ranks, before an epoch, whose samplers have these states."""
    states = []
    for at in own:
        sampler = Counting()
        sampler.at = at
        states.append(DataLoader(Made(20, torch.tensor), 4, sampler=sampler).state_dict())
    return states


@pytest.mark.parametrize(
    "own",
    [
        [3, 3],
        [torch.arange(3), torch.arange(3)],
        [np.arange(3), np.arange(3)],
        [[{"a": torch.ones(2)}], [{"a": torch.ones(2)}]],
    ],
    ids=["number", "tensor", "array", "nested"],
)
def test_states_of_samplers_that_are_alike_between_epochs(own: list[Any]) -> None:
    """One for all, where ranks save what was merged before, too."""
    states = _between(own)
    assert repr(merge_state_dicts(states)["source"]["state"]["sampler"]) == repr({"at": own[0], "epoch": 0})
    merged = [{**state, "kind": "merged"} for state in states]
    assert repr(merge_state_dicts(merged)) == repr(merged[0])


@pytest.mark.parametrize(
    "own",
    [
        [3, 4],
        [torch.arange(3), torch.arange(4)],
        [torch.arange(3), torch.tensor([0, 1, 3])],
        [torch.arange(3), torch.arange(3.0)],
        [np.arange(3), np.array([0, 1, 3])],
        [[{"a": torch.ones(2)}], [{"a": torch.zeros(2)}]],
        [torch.arange(3), 3],
    ],
    ids=["number", "longer", "tensor", "dtype", "array", "nested", "kind"],
)
def test_states_of_samplers_that_differ_between_epochs(own: list[Any]) -> None:
    """One rank's is not given to another."""
    with pytest.raises(ValueError, match="samplers have other states; every rank resumes from its own"):
        merge_state_dicts(_between(own))


@pytest.mark.parametrize("drawn", ["sampler", "loader"])
def test_generators_of_ranks_that_do_not_tell_their_share(drawn: str) -> None:
    """Between two epochs, too, no rank is given another's; one that is alike on all is everyone's."""

    def merged(seeds: tuple[int, int]) -> Any:
        states = []
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            data: Any = range(20)
            sampler = RandomSampler(data, generator=generator if drawn == "sampler" else None)
            own = generator if drawn == "loader" else None
            states.append(DataLoader(data, 4, sampler=sampler, generator=own).state_dict())
        return merge_state_dicts(states), states

    state, states = merged((3, 3))
    assert state["generators"] == states[0]["generators"]
    with pytest.raises(ValueError, match="do not tell their ranks; every rank resumes from its own state"):
        merged((3, 4))


def test_what_differs_besides_the_rank_is_named() -> None:
    data: Any = range(40)
    loader: Any = DataLoader(data, 4, sampler=DistributedSampler(data, 2, 0, seed=3))
    next(iter(loader))
    other: Any = DataLoader(data, 4, sampler=DistributedSampler(data, 2, 0, seed=4))
    with pytest.raises(ValueError, match="the state was saved with seed=3, this sampler has 4"):
        other.load_state_dict(loader.state_dict())


@pytest.mark.parametrize("sampler", [None, RandomSampler(range(40))], ids=["sequence", "random"])
def test_shares_of_a_sampler_that_shares_nothing_out(sampler: Any) -> None:
    """A damaged state: refused when it is loaded."""
    data: Any = range(40)
    loader: Any = DataLoader(data, 4, sampler=sampler)
    next(iter(loader))
    state = loader.state_dict()
    state["source"]["gone"] = {"below": 4, "above": ""}
    resumed: Any = DataLoader(data, 4, sampler=sampler)
    with pytest.raises(ValueError, match="'gone' tells of an epoch that torch's DistributedSampler shared out"):
        resumed.load_state_dict(state)
    assert len(list(resumed)) == 10
