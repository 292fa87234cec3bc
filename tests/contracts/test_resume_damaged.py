"""Damaged states: refused, or an error when the epoch comes to what is wrong."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DistributedSampler, RandomSampler

from minato_gpu import DataLoader
from minato_gpu.checkpoint.resumption import Resumption
from tests.contracts.resuming import DATA, RaisesOnce, after, loader_of
from tests.contracts.samplers import KeepsPlace, RestartingBatches, Unknown


class Endless:
    """A sampler with a state that never ends, and its own length says nothing."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.at += 1
            yield (self.at - 1) % 40

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class ListedUnknown:
    """Batches of a sampler of unknown kind."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[1, 2], [3, 4, 5], [6], [7, 8]])


def _damaged(state: Any, progress: dict[str, Any] | None = None, /, **source: Any) -> Any:
    return {**state, "progress": progress or state["progress"], "source": {**state["source"], **source}}


def _rest(loader: Any, state: Any) -> list[Any]:
    """What is left after a state."""
    loader.load_state_dict(state)
    return list(loader)


def _bits(lo: int, hi: int) -> str:
    value = ((1 << (hi - lo)) - 1) << lo
    return base64.b64encode(value.to_bytes((hi + 7) // 8, "little")).decode()


def test_delivered_beyond_the_end() -> None:
    """Such an epoch would never come to its end."""
    progress = {"batches": 20, "below": 0, "above": _bits(1000, 1080)}
    samplers: list[Any] = [None, RandomSampler(DATA), DistributedSampler(DATA, 2, 0)]
    for sampler in samplers:
        loader = loader_of(sampler, num_workers=1, in_order=False)
        with pytest.raises(ValueError, match="delivered up to position 1080, and the sampler ends at 40"):
            loader.load_state_dict(_damaged(after(loader_of(sampler), 1), progress))
    progress = {"batches": 22, "below": 8, "above": _bits(1000, 1080)}
    loader = DataLoader(DATA[:20], 4, sampler=Unknown(), num_workers=1, in_order=False)
    with pytest.raises(ValueError, match="delivered up to position 1088, and the stored order ends after 6 at 23"):
        loader.load_state_dict(_damaged(after(DataLoader(DATA[:20], 4, sampler=Unknown()), 2), progress))


@pytest.mark.parametrize("progress", [{"batches": 8, "below": 2, "above": _bits(1, 31)}, None])
def test_delivered_beyond_an_end_that_only_the_sampler_knows(progress: Any) -> None:
    """A sampler with a state: its epoch ends in an error, not never. So do two ranks' shares, and lists of batches."""
    if progress is not None:
        sampler: Any = {"batch_size": 4, "sampler": KeepsPlace()}
        source = {"place": 0, "position": 0, "planes": [], "state": {"sampler": {"yielded": 0}, "iterator": None}}
    else:
        sampler = {"batch_sampler": [[1, 2], [3, 4], [5]]}
        progress, source = {"batches": 9, "below": 2, "above": _bits(1, 3)}, {}
    state = _damaged(after(DataLoader(DATA, **sampler), 1), progress, **source)
    loader: Any = DataLoader(DATA, **sampler, num_workers=1, in_order=False, timeout=20)
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match=r"but the sampler ends|positions are not those of so many"):
        list(loader)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"place": 10**6}, "'place' must be a whole number from 0 to 3, got 1000000"),
        ({"place": 1}, "place 1 of batches of 4 is not at position 12"),
        ({"position": 13}, "'position' must be a whole number from 0 to 12, got 13"),
        ({"drawn": []}, None),
    ],
)
def test_a_stored_order_that_begins_elsewhere(source: dict[str, Any], message: str | None) -> None:
    loader = loader_of(RaisesOnce(-1), num_workers=1, timeout=20)
    state = _damaged(after(loader_of(RaisesOnce(-1)), 3), **source)
    if message is None:
        loader.load_state_dict(state)
        assert list(loader) == []
    else:
        with pytest.raises(ValueError, match=message):
            loader.load_state_dict(state)


@pytest.mark.parametrize("drop_last", [False, True])
def test_stored_batches_of_another_size(drop_last: bool) -> None:
    """Batches are counted by their samples: an epoch with such might never come to its end."""

    def check(make: Any, batches: int, *bad: list[list[int]]) -> None:
        state = after(make(), batches)
        make().load_state_dict(state)
        for stored in bad:
            with pytest.raises(ValueError, match=r"a stored batch of \d keys among batches of"):
                make().load_state_dict(_damaged(state, drawn=stored))

    def unknown() -> Any:
        return DataLoader(DATA[:22], 4, sampler=Unknown(), drop_last=drop_last)

    whole = after(unknown(), 1)["source"]["drawn"]
    assert len(whole[-1]) == (4 if drop_last else 3)
    short = [[whole[0][:3]]] if drop_last else []
    check(unknown, 1, [whole[0][1:], *whole[1:]], [*whole, [1, 2, 3, 4, 5]], *short)

    def counting() -> Any:
        return DataLoader(DATA, 4, sampler=KeepsPlace(), drop_last=drop_last)

    drawn = after(counting(), 0)["source"]["drawn"]
    check(counting, 0, [drawn[0][1:]], [[*drawn[0], 9]])  # others follow
    check(lambda: DataLoader(DATA, None, sampler=Unknown()), 1, [[1, 2]])


def test_a_short_batch_before_others() -> None:
    """Only the last one can be, and it leaves nothing behind."""
    loader = loader_of(Unknown(), num_workers=1, in_order=False, worker_kind="thread")
    state = _damaged(after(loader_of(Unknown()), 2), {"batches": 3, "below": 8, "above": _bits(1, 3)})
    with pytest.raises(ValueError, match="3 batches of 4 cannot hold 10 samples"):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    "sampler",
    [lambda: list(ListedUnknown()), RestartingBatches, ListedUnknown],
    ids=["drawn again", "with a state", "stored"],
)
@pytest.mark.parametrize("out_of_order", [False, True])
def test_another_number_of_whole_batches(sampler: Any, out_of_order: bool) -> None:
    """A user's own batches have no size that would tell how many there are."""

    def make(**more: Any) -> Any:
        return DataLoader(DATA, batch_sampler=sampler(), **more)

    order = [len(batch) for batch in make()]
    state = after(make(), 1)
    progress: dict[str, Any] = {"batches": 1, "below": order[0], "above": ""}
    more: dict[str, Any] = {"num_workers": 0}
    if out_of_order:
        progress = {"batches": 2, "below": order[0], "above": _bits(order[1], order[1] + order[2])}
        more = {"num_workers": 1, "worker_kind": "thread", "in_order": False, "timeout": 20}
    assert len(_rest(make(**more), _damaged(state, progress))) == len(order) - progress["batches"]
    for name, by in (("batches", 1), ("batches", 2), ("batches", -1), ("below", 1)):
        bad = {**progress, name: progress[name] + by}
        with pytest.raises(ValueError, match="state"):
            _rest(make(**more), _damaged(state, bad))


def test_an_endless_sampler_is_not_drawn_to_a_far_line() -> None:
    """What is delivered before the sampler's own state is at most the first part of its next batch."""
    state = _damaged(after(loader_of(Endless()), 3), {"batches": 10**12, "below": 4 * 10**12, "above": ""})
    loader = loader_of(Endless())
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match="its order begins long before"):
        iter(loader)


def test_a_million_gaps() -> None:
    """Refused before they are taken apart: a span of Python's takes hundreds of times its bits."""
    state = after(loader_of(), 1)
    loader = loader_of(num_workers=1, in_order=False)
    for junk, message in ((b"\xaa" * (1 << 20), "'above' has 4194304 spans"), (bytes(2 << 20), "longer than any")):
        above = base64.b64encode(junk).decode()
        with pytest.raises(ValueError, match=message):
            Resumption(loader, _damaged(state, {"batches": 1, "below": 0, "above": above}))
    assert json.dumps(loader.state_dict())
