"""States from a file that somebody made to do harm: nested without end, or with numbers that take for ever."""

from __future__ import annotations

import contextlib
import copy
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler

from minato_gpu import DataLoader, merge_state_dicts
from minato_gpu.checkpoint import state as s
from minato_gpu.sampling.delivered_positions import DeliveredPositions
from tests.contracts.samplers import KeepsPlace, Unknown
from tests.support.concurrency import alone
from tests.support.examples import half
from tests.support.numbers import LENGTH, Plain

_DATA: Any = list(range(24))


class _Stream(IterableDataset[int]):
    """Numbers below 24, with a state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while self.at < 24:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def _loader(kind: str, rank: int = 1) -> Any:
    ways: dict[str, dict[str, Any]] = {
        "replay": {"sampler": RandomSampler(_DATA, generator=torch.Generator().manual_seed(1))},
        "state": {"sampler": KeepsPlace()},
        "keys": {"sampler": Unknown()},
        "ranks": {"sampler": DistributedSampler(_DATA, 2, rank)},
    }
    return DataLoader(_Stream(), 4) if kind == "stream" else DataLoader(_DATA, 4, **ways[kind])


def _state(kind: str, rank: int = 1) -> Any:
    loader = _loader(kind, rank)
    iterator = iter(loader)
    next(iterator)
    return json.loads(json.dumps(loader.state_dict()))


_STATES = {kind: _state(kind) for kind in ("replay", "state", "keys", "ranks", "stream")}
_STATES["between"] = json.loads(json.dumps(_loader("state").state_dict()))


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    parts = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    return [*([path] if path else []), *(below for key, part in parts for below in _paths(part, (*path, key)))]


def _nested(depth: int, within: str) -> Any:
    value: Any = []
    for _ in range(depth):
        value = {"a": value} if within == "dict" else [value]
    return value


@pytest.mark.parametrize(("depth", "within"), [(600, "list"), (950, "dict"), (3_000, "list")])
@pytest.mark.parametrize("kind", _STATES)
def test_nested_deeply(kind: str, depth: int, within: str) -> None:
    """In any field: refused, or the user's own sampler or data set is given it."""
    for path in _paths(_STATES[kind]):
        state = copy.deepcopy(_STATES[kind])
        at = state
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = _nested(depth, within)
        loader: Any = _loader("state" if kind == "between" else kind)
        own = path[:2] == ("source", "state") or (path[:2] == ("source", "streams") and "state" in path)
        with contextlib.suppress(ValueError, *((TypeError, KeyError) if own else ())):
            loader.load_state_dict(state)
            list(loader)


def test_merging_states_nested_deeply() -> None:
    both = [_state("ranks", 0), _state("ranks", 1)]
    for state in both:
        state["source"]["gone"] = _nested(20_000, "list")
    with pytest.raises(ValueError, match="nested too deeply"):
        merge_state_dicts(both)


@half()
@given(
    st.recursive(
        st.none() | st.integers() | st.text() | st.binary() | st.floats(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_values_in_messages_are_short(value: Any) -> None:
    shown = s.quoted(value)
    assert 0 < len(shown) <= 60
    if len(repr(value)) <= 20 and not isinstance(value, (list, dict)):
        assert shown == repr(value)


_FAR = 10 << 30


def _endless() -> Any:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        _DATA, 10, sampler=RandomSampler(_DATA, replacement=True, num_samples=1 << 40, generator=generator)
    )


@pytest.mark.timeout(30)
@pytest.mark.parametrize("below", [_FAR, (1 << 28) + 2])
def test_keys_are_not_drawn_again_for_ever(below: int) -> None:
    loader = _endless()
    next(iter(loader))
    state = loader.state_dict()
    state["progress"] = {"batches": -(-below // 10), "below": below - below % 10 + 10 * bool(below % 10), "above": ""}
    with pytest.raises(ValueError, match=r"'below' tells of \d+ samples .* at most 268435456 are"):
        _endless().load_state_dict(state)


@settings(max_examples=20)
@given(st.integers(256, 2000))
def test_planes_are_bounded(count: int) -> None:
    state = copy.deepcopy(_STATES["state"])
    state["source"]["planes"] = [[0, ""]] * count
    with pytest.raises(ValueError, match=f"'planes' has {count} entries, 255 at most"):
        _loader("state").load_state_dict(state)
    state["source"]["planes"] = [[0, ""]] * 255
    _loader("state").load_state_dict(state)


@pytest.mark.parametrize("field", ["version", "set_epoch", "seed"])
def test_merging_states_that_hold_tensors(field: str) -> None:
    """Refused, or taken for another state: a comparison of tensors is no answer."""
    both = [_state("ranks", 0), _state("ranks", 1)]
    where = {"set_epoch": both[0]["source"], "seed": both[0]["source"]["rank"]}.get(field, both[0])
    where[field] = torch.ones(3)
    with pytest.raises(ValueError, match=r"differ in more than their rank|a state of version"):
        merge_state_dicts(both)


@pytest.mark.parametrize(("workers", "ahead"), [(0, 2), (1, 0)])
def test_a_state_may_be_asked_for_while_batches_are_delivered(
    monkeypatch: pytest.MonkeyPatch, workers: int, ahead: int
) -> None:
    """By a thread that saves now and then, say."""
    add, rewound, inside = DeliveredPositions.add, DeliveredPositions.rewound, threading.Lock()

    def adds(self: DeliveredPositions, *given: Any, **more: Any) -> None:
        with alone(inside, "a state is made meanwhile"):
            add(self, *given, **more)

    def looks(self: DeliveredPositions, batches: int) -> DeliveredPositions:
        with alone(inside, "a batch is delivered meanwhile"):
            return rewound(self, batches)

    monkeypatch.setattr(DeliveredPositions, "add", adds)
    monkeypatch.setattr(DeliveredPositions, "rewound", looks)
    more: dict[str, Any] = {"worker_kind": "thread"} if workers else {}
    loader: Any = DataLoader(Plain(), 4, num_workers=workers, **more)
    over, states = threading.Event(), list[Any]()

    def save() -> None:
        while not over.is_set():
            states.append(loader.state_dict(ahead)["progress"])

    batches = iter(loader)
    for _ in range(ahead):
        next(batches)
    with ThreadPoolExecutor() as pool:
        saving = pool.submit(save)
        try:
            for _ in batches:
                if saving.done():
                    break
        except BaseException:
            over.set()
            raise
        over.set()
        assert saving.exception() is None or "ahead" in str(saving.exception())
    assert states and all(one["below"] == min(4 * one["batches"], LENGTH) for one in states)
