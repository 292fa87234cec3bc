"""Samplers that keep to little: to their length, to an end, to a generator of their own. What is saved comes back all
the same, or is refused; and from loaders without workers to those with some, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler

from tests.contracts.datasets import Made, draw
from tests.contracts.modes import IN_ORDER, IN_ORDER_THREADS
from tests.contracts.resuming import through_json
from tests.contracts.samplers import (
    ChunkByChunk,
    Counting,
    Forgetful,
    KeyByKey,
    Late,
    Refilling,
    Restarting,
    RestartingBatches,
    Unstated,
    Varying,
)


class OwnBatches(BatchSampler):
    """A batch sampler of which nothing is known, over a sampler that has a state."""


class AtOnce(BatchSampler):
    """The same, that draws all before its first batch."""

    def __iter__(self) -> Iterator[list[int]]:
        keys = list(self.sampler)
        return iter([keys[k : k + self.batch_size] for k in range(0, len(keys), self.batch_size)])


_TORCHDATA: dict[str, Callable[[], dict[str, Any]]] = {}
with suppress(ImportError):
    from torchdata.stateful_dataloader.sampler import BatchSampler as Batches

    _TORCHDATA = {
        "torchdata's batches": lambda: {"batch_sampler": Batches(Counting(), 4, False)},
        "torchdata's batches, short": lambda: {"batch_sampler": Batches(Counting(18), 4, False)},
        "torchdata's batches, key by key": lambda: {"batch_sampler": Batches(KeyByKey(), 4, False)},
    }

_SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "counting": lambda: {"batch_size": 4, "sampler": Counting()},
    "yields fewer than it says": lambda: {"batch_size": 4, "sampler": Counting(7, told=10)},
    "yields more than it says": lambda: {"batch_size": 4, "sampler": Counting(11, told=5)},
    "varying": lambda: {"batch_sampler": Varying()},
    "restarting": lambda: {"batch_size": 4, "sampler": Restarting()},
    "restarting, short": lambda: {"batch_size": 4, "sampler": Restarting(18)},
    "restarting, drop_last": lambda: {"batch_size": 4, "sampler": Restarting(18), "drop_last": True},
    "restarting, batches": lambda: {"batch_sampler": RestartingBatches()},
    "late": lambda: {"batch_size": 4, "sampler": Late()},
    "late, in batches that are drawn at once": lambda: {"batch_sampler": AtOnce(Late(), 4, False)},
    "refilling": lambda: {"batch_size": 4, "sampler": Refilling()},
    "refilling, short": lambda: {"batch_size": 4, "sampler": Refilling(18)},
    "refilling, single": lambda: {"batch_size": None, "sampler": Refilling()},
    "key by key": lambda: {"batch_size": 4, "sampler": KeyByKey()},
    "key by key, short": lambda: {"batch_size": 4, "sampler": KeyByKey(18)},
    "key by key, large": lambda: {"batch_size": 18, "sampler": KeyByKey(24)},
    "key by key, single": lambda: {"batch_size": None, "sampler": KeyByKey()},
    "chunk by chunk": lambda: {"batch_size": 4, "sampler": ChunkByChunk()},
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
        state = through_json(loader.state_dict())
        for _ in range(2):  # taken up, and saved again at once
            resumed = make()
            resumed.load_state_dict(state)
            iterator = iter(resumed)
            state = through_json(resumed.state_dict())
        assert got + _keys(iterator) == epochs[1], step
        again = make()
        again.load_state_dict(through_json(resumed.state_dict()))
        assert _keys(again) == _keys(resumed) == epochs[2], step


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("others", [False, True])
def test_others_that_draw_while_a_replayed_order_is_drawn(others: bool, workers: int) -> None:
    """A permutation after another, each drawn when it is needed: it comes again, or is refused."""

    def make() -> tuple[Any, torch.Generator]:
        own, data = torch.Generator().manual_seed(0), Made(16, torch.tensor)
        sampler = RandomSampler(data, num_samples=80, generator=own)
        return IN_ORDER_THREADS.loader(data, 8, sampler=sampler, num_workers=workers), own

    loader, own = make()
    iterator = iter(loader)
    for batch in range(9):
        if batch:
            next(iterator)
            if others:
                torch.rand(1, generator=own)
        state = through_json(loader.state_dict())
        resumed, _ = make()
        resumed.load_state_dict(state)
        if others and batch > 6:  # the window of one worker is further on than what others draw by then
            with pytest.raises(ValueError, match=r"keys are not those that were delivered.*nobody else may draw"):
                iter(resumed)
        elif not others:
            again = iter(resumed)
            assert resumed.state_dict()["source"].get("digest") == state["source"].get("digest")
            assert _keys(again)[0] == _keys(islice(make()[0], 10))[batch]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_that_tells_too_little(workers: int) -> None:
    """Where other keys follow than did, that is said when the epoch would go on, and no sample is delivered."""

    def make() -> Any:
        return IN_ORDER_THREADS.loader(Made(20, torch.tensor), 4, sampler=Forgetful(), num_workers=workers)

    loader = make()
    iterator = iter(loader)
    next(iterator)
    state = through_json(loader.state_dict())
    resumed = make()
    resumed.load_state_dict(state)
    with pytest.raises(ValueError, match="Forgetful does not go on from its state as it did when that was saved"):
        iter(resumed)
    state["source"]["next"] = {"items": 1 << 40, "witness": 1}
    with pytest.raises(ValueError, match="'items' must be a whole number from 1 to 16"):
        make().load_state_dict(state)


def test_a_sampler_that_raises_when_a_save_looks_ahead() -> None:
    """The consumer gets all that comes before, then the error; and so does who goes on from any state."""

    class Raising(KeyByKey):
        def __iter__(self) -> Iterator[int]:
            for key in super().__iter__():
                if self.at == 13:
                    self.at = 12
                    raise OSError("no more")
                yield key

    loader = IN_ORDER.loader(Made(20, torch.tensor), 4, sampler=Raising())
    iterator = iter(loader)
    for left in (3, 2, 1):
        resumed = IN_ORDER.loader(Made(20, torch.tensor), 4, sampler=Raising())
        resumed.load_state_dict(through_json(loader.state_dict()))
        rest = iter(resumed)
        for _ in range(left):
            next(rest)
        with pytest.raises(OSError, match="no more"):
            next(rest)
        next(iterator)
    loader.state_dict()
    with pytest.raises(OSError, match="no more"):
        next(iterator)


def test_fewer_keys_than_told_by_one_of_which_nothing_is_known() -> None:
    """The last batch may be short wherever the keys that are left are stored."""
    for workers in (0, 1):

        def make(workers: int = workers) -> Any:
            return IN_ORDER_THREADS.loader(list(range(20)), 4, sampler=Unstated(7, told=10), num_workers=workers)

        whole = _keys(make())
        for step in range(3):
            loader = make()
            iterator = iter(loader)
            got = _keys(islice(iterator, step))
            resumed = make()
            resumed.load_state_dict(through_json(loader.state_dict()))
            assert got + _keys(resumed) == whole


@pytest.mark.parametrize("sampler", [Counting, Unstated])
@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2), (0, 0), (2, 2)])
def test_another_number_of_workers(before: int, after: int, sampler: type[Counting]) -> None:
    """Keys that come again have the draws of that time of coming, though a loader without workers draws nothing."""

    def make(workers: int) -> Any:
        data, more = Made(20, draw), {"collate_fn": list, "num_workers": workers}
        return IN_ORDER.loader(data, 4, sampler=sampler(), generator=torch.Generator().manual_seed(1), **more)

    whole = list(make(2))
    keys = [sample[0] for batch in whole for sample in batch]
    assert set(keys[:8]) & set(keys[8:])
    loader = make(before)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    resumed = make(after)
    resumed.load_state_dict(through_json(loader.state_dict()))
    rest = list(resumed)
    assert [[sample[0] for sample in batch] for batch in rest] == [
        [sample[0] for sample in batch] for batch in whole[2:]
    ]
    if after:
        assert rest == whole[2:]
