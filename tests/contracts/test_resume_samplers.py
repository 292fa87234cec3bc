"""Save and resume with samplers that the table of cases does not have: torch's others, a user's own, torchdata's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from tests.contracts.datasets import Made, draw
from tests.contracts.modes import IN_ORDER, IN_ORDER_THREADS
from tests.contracts.resuming import DATA, generator
from tests.contracts.run import stored
from tests.contracts.samplers import Counting, KeyByKey, Late, Refilling, Unstated, Varying


class Drawn:
    """A sampler that draws its order from a public generator and keeps it in its state, which it takes up when it is
    asked for its first key."""

    def __init__(self) -> None:
        self.generator = generator(3)
        self.now: dict[str, Any] = {"at": 0, "order": []}
        self.loaded = self.now

    def __len__(self) -> int:
        return 15

    def __iter__(self) -> Iterator[int]:
        self.now, self.loaded = dict(self.loaded), {"at": 0, "order": []}
        order = self.now["order"] = self.now["order"] or torch.randperm(15, generator=self.generator).tolist()
        while self.now["at"] < 15:
            self.now["at"] += 1
            yield order[self.now["at"] - 1]

    def state_dict(self) -> dict[str, Any]:
        return self.now

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class OwnBatches(BatchSampler):
    """A batch sampler of which nothing is known, over a sampler that has a state."""


_TORCHDATA: dict[str, Callable[[], dict[str, Any]]] = {}
with suppress(ImportError):
    from torchdata.stateful_dataloader import sampler as torchdata

    def _distributed(shuffle: bool) -> Any:
        return torchdata.StatefulDistributedSampler(DATA[:15], num_replicas=1, rank=0, shuffle=shuffle)

    def _random(**more: Any) -> Any:
        return torchdata.RandomSampler(DATA[:15], generator=generator(2), **more)

    _TORCHDATA = {
        "torchdata's distributed": lambda: {"batch_size": 4, "sampler": _distributed(False)},
        "torchdata's distributed, drop_last": lambda: {
            "batch_size": 4,
            "sampler": _distributed(True),
            "drop_last": True,
        },
        "torchdata's distributed, single": lambda: {"batch_size": None, "sampler": _distributed(True)},
        "torchdata's random": lambda: {"batch_size": 4, "sampler": _random()},
        "torchdata's random, replacement": lambda: {"batch_size": 4, "sampler": _random(replacement=True)},
        "torchdata's batches": lambda: {"batch_sampler": torchdata.BatchSampler(_distributed(True), 4, False)},
    }

_SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "replacement": lambda: {"batch_size": 5, "sampler": RandomSampler(range(9), True, 23, generator(2))},
    "subset": lambda: {"batch_size": 4, "sampler": SubsetRandomSampler([*range(3, 17), 3, 3], generator(3))},
    "weighted": lambda: {
        "batch_size": 4,
        "sampler": WeightedRandomSampler([1.0, 2.0, 5.0] * 6, 22, generator=generator(4)),
    },
    "drawn": lambda: {"batch_size": 4, "sampler": Drawn()},
    "counting": lambda: {"batch_size": 4, "sampler": Counting()},
    "yields fewer than it says": lambda: {"batch_size": 4, "sampler": Counting(7, told=10)},
    "varying": lambda: {"batch_sampler": Varying()},
    "late": lambda: {"batch_size": 4, "sampler": Late()},
    "refilling": lambda: {"batch_size": 4, "sampler": Refilling()},
    "refilling, single": lambda: {"batch_size": None, "sampler": Refilling()},
    "key by key": lambda: {"batch_size": 4, "sampler": KeyByKey()},
    "key by key, large": lambda: {"batch_size": 18, "sampler": KeyByKey(24)},
    "key by key, single": lambda: {"batch_size": None, "sampler": KeyByKey()},
    "own batches": lambda: {"batch_sampler": OwnBatches(Counting(), 4, False)},
    **_TORCHDATA,
}


def _keys(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in islice(batches, 40)]


@pytest.mark.each_value
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", _SAMPLERS)
def test_every_save_point(name: str, workers: int) -> None:
    """Saved once at each step of the second epoch, after the end and between: what is left, and the epoch after it,
    also where it is saved once more before that."""

    def make() -> Any:
        return IN_ORDER_THREADS.loader(Made(24, torch.tensor), num_workers=workers, **_SAMPLERS[name]())

    whole = make()
    epochs = [_keys(whole) for _ in range(3)]
    for step in range(-1, len(epochs[1]) + 1, 1 + workers):
        loader, got = make(), list[list[int]]()
        list(islice(loader, 40))
        if step >= 0:
            iterator = iter(loader)
            got = _keys(islice(iterator, step))
        state = stored(loader.state_dict())
        for _ in range(2):  # taken up, and saved again at once
            resumed = make()
            resumed.load_state_dict(state)
            iterator = iter(resumed)
            state = stored(resumed.state_dict())
        assert got + _keys(iterator) == epochs[1], step
        again = make()
        again.load_state_dict(stored(resumed.state_dict()))
        assert _keys(again) == _keys(resumed) == epochs[2], step


@pytest.mark.parametrize("sampler", [Counting, Unstated])
@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2)])
def test_with_workers_or_without(before: int, after: int, sampler: type[Counting]) -> None:
    """(Another number of workers is in the table.)"""

    def make(workers: int) -> Any:
        return IN_ORDER.loader(Made(60, torch.tensor), 4, sampler=sampler(60), num_workers=workers)

    loader, resumed = make(before), make(after)
    iterator = iter(loader)
    got = _keys(islice(iterator, 2))
    resumed.load_state_dict(stored(loader.state_dict()))
    assert [*got, *_keys(resumed)] == _keys(make(0))


@pytest.mark.parametrize("sampler", [Counting, Unstated])
def test_keys_that_come_again_have_the_draws_of_that_time(sampler: type[Counting]) -> None:
    def make() -> Any:
        data, more = Made(60, draw), {"collate_fn": list, "num_workers": 2}
        return IN_ORDER.loader(data, 4, sampler=sampler(60), generator=torch.Generator().manual_seed(1), **more)

    whole = list(make())
    keys = [sample[0] for batch in whole for sample in batch]
    assert set(keys[:8]) & set(keys[8:])
    loader = make()
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    resumed = make()
    resumed.load_state_dict(stored(loader.state_dict()))
    assert list(resumed) == whole[2:]


def test_a_sampler_is_asked_for_nothing_before_its_first_key() -> None:
    """Not by a loader with workers, nor by one that has drawn nothing yet: that draws, and delivers it all the same."""

    class Strict(Drawn):
        def state_dict(self) -> dict[str, Any]:
            assert self.now["at"], "asked between iter() and the first key"
            return super().state_dict()

    for workers in (0, 1):
        loader = IN_ORDER.loader(Made(15, torch.tensor), 4, sampler=Strict(), num_workers=workers)
        iterator = iter(loader)
        state = stored(loader.state_dict())
        assert state["source"]["drawn"] and not state["progress"]["batches"]
        resumed = IN_ORDER.loader(Made(15, torch.tensor), 4, sampler=Strict(), num_workers=workers)
        resumed.load_state_dict(state)
        assert _keys(resumed) == _keys(iterator) != []
