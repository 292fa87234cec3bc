"""Save and resume with every kind of sampler: torch's, the user's own, with a state, and such as cannot be saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from minato_gpu import DataLoader
from tests.contracts.datasets import Costly, Made, draw, rows
from tests.contracts.modes import BOUNDED_8, IN_ORDER, Mode
from tests.contracts.resuming import generator, interrupted, saves_along, sorted_samples
from tests.contracts.samplers import KeepsPlace, KeepsPlaceInIterator, Unknown

_LISTED = [[1, 2, 3], [4], [], [5, 6, 6, 6], [6, 7], [8, 9, 10, 11, 6]]


class Batches(BatchSampler):
    """A batch sampler of the user's own: unequal batches, repeated keys, an empty one."""

    def __init__(self) -> None:
        super().__init__(range(12), 3, False)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(_LISTED)

    def __len__(self) -> int:
        return len(_LISTED)


_SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "sequential": lambda: {"batch_size": 4},
    "shuffled": lambda: {"batch_size": 4, "shuffle": True},
    "shuffled, drop_last": lambda: {"batch_size": 3, "shuffle": True, "drop_last": True},
    "with replacement": lambda: {
        "batch_size": 5,
        "sampler": RandomSampler(range(9), replacement=True, num_samples=43, generator=generator(2)),
    },
    "global generator": lambda: {"batch_size": 4, "sampler": RandomSampler(range(20), True, 41)},
    "subset": lambda: {"batch_size": 4, "sampler": SubsetRandomSampler([*range(3, 17), 3, 3], generator(3))},
    "weighted": lambda: {"batch_size": 4, "sampler": WeightedRandomSampler([1.0, 2.0, 5.0] * 6, 33)},
    "list with repeats": lambda: {"batch_size": 4, "sampler": [5, 5, 1, 2, 5, 3, 1, 1, 9, 8, 5, 5, 7]},
    "strings": lambda: {"batch_size": 3, "sampler": [str(n % 5) for n in range(17)]},
    "unknown": lambda: {"batch_size": 4, "sampler": Unknown()},
    "state": lambda: {"batch_size": 4, "sampler": KeepsPlace()},
    "state of the iterator": lambda: {"batch_size": 4, "sampler": KeepsPlaceInIterator()},
    "list of batches": lambda: {"batch_sampler": [list(batch) for batch in _LISTED if batch]},
    "batch sampler": lambda: {"batch_sampler": Batches(), "collate_fn": list},
    "torch's batch sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(14)), 4, False)},
    "no batches": lambda: {"batch_size": None},
    "no batches, unknown": lambda: {"batch_size": None, "sampler": Unknown()},
}
_SINGLE = ("no batches", "no batches, unknown")


def _rows(batches: Any, name: str) -> list[Any]:
    """The batches as comparable lists of samples."""
    if name in _SINGLE:
        return [[str(value) for value in sample] for sample in batches]
    if name == "batch sampler":
        return [[tuple(map(str, sample)) for sample in batch] for batch in batches]
    return [[tuple(map(str, sample)) for sample in rows([batch])] for batch in batches]


@pytest.mark.each_value
@pytest.mark.parametrize("name", _SAMPLERS)
@pytest.mark.parametrize("mode", [IN_ORDER, BOUNDED_8], ids=lambda mode: mode.name)
def test_every_sampler(mode: Mode, name: str) -> None:
    """Also where an index repeats: its later occurrences have content of their own, before and after a resume.

    In order after an odd number of batches, out of order after an even one.
    """

    def make(workers: int = 1) -> Any:
        torch.manual_seed(99)
        return mode.loader(Made(20, draw), num_workers=workers, generator=generator(), **_SAMPLERS[name]())

    reference = _rows(make(), name)
    stride = 1 if len(reference) < 8 else 3
    for first, state in saves_along(make(2), stride)[mode.lateness == 0 :: 2]:
        resumed = make()
        resumed.load_state_dict(state)
        torch.manual_seed(123)  # the epoch's order is settled, whatever the global generator does
        epoch = _rows([*first, *resumed], name)
        if mode.lateness:
            assert sorted(map(repr, sorted_samples(epoch))) == sorted(map(repr, sorted_samples(reference)))
        else:
            assert epoch == reference


def test_a_stateful_sampler_is_given_its_state() -> None:
    """What it had yielded of the delivered batches, not what the loader had drawn ahead."""
    sampler = KeepsPlace()
    _, state, _ = interrupted(lambda: DataLoader(Costly(20), 4, sampler=KeepsPlace(), num_workers=2), 2)
    assert state["source"]["state"]["sampler"] == {"yielded": 8}
    loader = DataLoader(Costly(20), 4, sampler=sampler, num_workers=2)
    loader.load_state_dict(state)
    assert sum(len(batch) for batch in loader) == 15
    assert sampler.loaded == [8]


def test_a_sampler_that_cannot_be_stored() -> None:
    class Objects(Unknown):
        def __iter__(self) -> Iterator[Any]:
            return iter([object() for _ in range(8)])

    loader = DataLoader(Made(8, lambda key: 1), 2, sampler=Objects(), num_workers=1)
    next(iter(loader))
    with pytest.raises(ValueError, match="is a object, and only numbers, strings, bytes, tuples and lists can be"):
        loader.state_dict()


class _Untold(Sampler[int]):
    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Any:
        return iter(range(8))

    def state_dict(self) -> Any:
        raise RuntimeError("not now")

    def load_state_dict(self, state: Any) -> None:
        """Never called."""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_that_cannot_tell_its_state(workers: int) -> None:
    loader = DataLoader(Made(8, torch.tensor), 2, sampler=_Untold(), num_workers=workers)
    iterator = iter(loader)
    got = [next(iterator)]
    with pytest.raises(ValueError, match=r"cannot be saved: the sampler's state_dict\(\): RuntimeError: not now"):
        loader.state_dict()
    got += iterator
    assert torch.cat(got).tolist() == list(range(8))
