"""States that are refused: damaged ones, those of what cannot be saved, and of what would never come to its end."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from minato_gpu import DataLoader, merge_state_dicts
from minato_gpu.checkpoint.resumption import Resumption
from minato_gpu.samples import witness_of
from tests.contracts.datasets import Counts, Made, Streams
from tests.contracts.modes import IN_ORDER_THREADS
from tests.contracts.resuming import DATA, after, loader_of, through_json
from tests.contracts.samplers import Counting, Forgetful


class Endless(Counting):
    """A sampler with a state that never ends, and its own length says nothing."""

    __len__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[int]:
        while True:
            self.at += 1
            yield (self.at - 1) % 40


def _damaged(state: Any, progress: dict[str, Any] | None = None, /, **source: Any) -> Any:
    return {**state, "progress": progress or state["progress"], "source": {**state["source"], **source}}


def _bits(stop: int) -> str:
    """Of the positions from 1 on."""
    return base64.b64encode(((1 << stop) - 2).to_bytes((stop + 7) // 8, "little")).decode()


@pytest.mark.parametrize("progress", [{"batches": 8, "below": 2, "above": _bits(31)}, None])
def test_delivered_beyond_an_end_that_only_the_sampler_knows(progress: Any) -> None:
    """A sampler with a state: its epoch ends in an error, not never. So do two ranks' shares, and lists of batches."""
    if progress is not None:
        sampler: Any = {"batch_size": 4, "sampler": Counting(23)}
        source = {"place": 0, "position": 0, "counts": [], "state": {"sampler": {"at": 4, "epoch": 0}}}
        source.update(witness=witness_of(Counting(23).order()[4:8]), drawn=[Counting(23).order()[:4]])
    else:
        sampler = {"batch_sampler": [[1, 2], [3, 4], [5]]}
        progress, source = {"batches": 9, "below": 2, "above": _bits(3)}, {}
    state = _damaged(after(DataLoader(DATA, **sampler), 1), progress, **source)
    loader: Any = DataLoader(DATA, **sampler, num_workers=1, in_order=False, timeout=20)
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match=r"but the sampler ends|positions are not those of so many"):
        list(loader)


def test_an_endless_sampler_is_not_drawn_to_a_far_line() -> None:
    """What was delivered lies within what is stored."""
    state = _damaged(after(loader_of(Endless()), 3), {"batches": 10**12, "below": 4 * 10**12, "above": ""})
    with pytest.raises(ValueError, match="position 4000000000000, and the stored order ends after 3 at 12"):
        loader_of(Endless()).load_state_dict(state)


def test_a_million_gaps() -> None:
    """Refused before they are taken apart: a span of Python's takes hundreds of times its bits."""
    state = after(loader_of(), 1)
    loader = loader_of(num_workers=1, in_order=False)
    for junk, message in ((b"\xaa" * (1 << 20), "'above' has 4194304 spans"), (bytes(2 << 20), "longer than any")):
        above = base64.b64encode(junk).decode()
        with pytest.raises(ValueError, match=message):
            Resumption(loader, _damaged(state, {"batches": 1, "below": 0, "above": above}))
    assert json.dumps(loader.state_dict())


class _Untold(Counting):
    def state_dict(self) -> Any:
        raise RuntimeError("not now")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_that_cannot_tell_its_state(workers: int) -> None:
    loader = DataLoader(Made(8, torch.tensor), 2, sampler=_Untold(8), num_workers=workers)
    iterator = iter(loader)
    got = [next(iterator)]
    with pytest.raises(ValueError, match=r"cannot be saved: the sampler's state_dict\(\): RuntimeError: not now"):
        loader.state_dict()
    got += iterator
    assert torch.cat(got).tolist() == _Untold(8).order()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_that_tells_too_little(workers: int) -> None:
    """Where other keys follow than did, that is said when the epoch would go on, and no sample is delivered."""

    def make() -> Any:
        return IN_ORDER_THREADS.loader(Made(400, torch.tensor), 4, sampler=Forgetful(400), num_workers=workers)

    for batches in (0, 1, 3):
        state = after(make(), batches)
        resumed = make()
        resumed.load_state_dict(state)
        with pytest.raises(ValueError, match="Forgetful does not go on from its state as it did when that"):
            iter(resumed)


def test_asked_before_it_goes_on() -> None:
    """Between load_state_dict and iter a state is the one that was loaded, and no other."""
    state = after(loader_of(), 5)
    for loader in (loader_of(), loader_of()):
        list(loader)
        loader.load_state_dict(state)
        assert through_json(loader.state_dict()) == state
        with pytest.raises(ValueError, match="ahead=1: nothing has been delivered since load_state_dict"):
            loader.state_dict(ahead=1)
        assert len(list(loader)) == 5


class EndlessStream(IterableDataset[Any]):
    """Never ends, has no state, and counts what is read of it."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.read += 1
            yield self.read


def _far(batches: int, **arguments: Any) -> tuple[Any, Any]:
    """A loader over an endless stream, and a state that says so many batches were delivered."""

    def make() -> Any:
        return DataLoader(EndlessStream(), 4, **arguments)

    loader = make()
    next(iter(loader))
    state = through_json(loader.state_dict())
    state["source"]["streams"][0]["batches"] = batches
    return make(), state


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batches", [1 << 26 | 1, 10**12, (1 << 63) - 1])
def test_an_endless_stream_is_not_read_for_ever(batches: int, workers: int) -> None:
    loader, state = _far(batches, num_workers=workers)
    with pytest.raises(ValueError, match=f"'batches' tells of a stream of which {4 * batches} samples were delivered"):
        loader.load_state_dict(state)
    assert loader.dataset.read == 0


def test_states_of_other_streams() -> None:
    loader = DataLoader(Counts([4]), 2)
    list(loader)
    state = through_json(loader.state_dict())
    with pytest.raises(ValueError, match="streams of 1 workers, this loader has 2"):
        DataLoader(Counts([4, 4]), 2, num_workers=2).load_state_dict(state)
    with pytest.raises(ValueError, match="holds one of the data set, but Streams takes none"):
        DataLoader(Streams([4]), 2).load_state_dict(state)
    with pytest.raises(ValueError, match="every rank resumes from its own state"):
        merge_state_dicts([state, state])
    for field, value in (("batches", 1), ("ended", 0), ("over", 3), ("state", {"of": "worker"}), ("state", 3)):
        damaged = copy.deepcopy(state)
        damaged["source"]["streams"][0][field] = value
        with pytest.raises(ValueError, match="state: '"):
            DataLoader(Counts([4]), 2).load_state_dict(damaged)
    streams: Any
    for streams in (3, [3], {}):
        with pytest.raises(ValueError, match="state"):
            DataLoader(Counts([4]), 2).load_state_dict({**state, "source": {**state["source"], "streams": streams}})
    assert merge_state_dicts([state]) == state
