"""The form of a state: size, cost, plain data, and that nothing in a damaged or hostile file gets through."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, RandomSampler

from minato_gpu import DataLoader, merge_state_dicts
from minato_gpu.checkpoint import state as s
from minato_gpu.samples import key_digest
from minato_gpu.sampling.delivered_positions import DeliveredPositions
from tests.contracts.samplers import Counting, Unstated
from tests.support.concurrency import alone
from tests.support.numbers import LENGTH, Plain

_DATA: Any = list(range(24))


def _loader(kind: str) -> Any:
    generator = torch.Generator().manual_seed(1)
    ways: dict[str, dict[str, Any]] = {
        "replay": {"sampler": RandomSampler(_DATA, generator=generator)},
        "global": {"shuffle": True},
        "state": {"sampler": Counting(24)},
        "keys": {"sampler": Unstated(24)},
        "ranks": {"sampler": DistributedSampler(_DATA, 2, 1)},
    }
    return DataLoader(_DATA, 4, **ways[kind])


def _state(kind: str) -> Any:
    loader = _loader(kind)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    return json.loads(json.dumps(loader.state_dict()))


_KINDS = ("replay", "global", "state", "keys", "ranks")
_STATES = {kind: _state(kind) for kind in _KINDS}
_MERGED = merge_state_dicts(
    [
        _STATES["ranks"],
        {
            **_STATES["ranks"],
            "source": {**_STATES["ranks"]["source"], "rank": {**_STATES["ranks"]["source"]["rank"], "rank": 0}},
        },
    ]
)


@pytest.mark.parametrize("kind", _KINDS)
def test_it_goes_through_torch_save_without_pickles(kind: str) -> None:
    file = io.BytesIO()
    torch.save(_STATES[kind], file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == _STATES[kind]


def test_its_size() -> None:
    """Under 1 KB besides what generators need; out of order a bit for each sample of the window, in base64."""
    samples: Any = list(range(4000))
    loader: Any = DataLoader(
        samples, 64, shuffle=True, num_workers=2, prefetch_factor=8, in_order=False, max_lateness=16
    )
    iterator = iter(loader)
    for _ in range(20):
        next(iterator)
        state = loader.state_dict()
        own = {**state, "generators": {}, "global": {}}
        assert len(json.dumps(own)) < 1024 + 16 * 64 / 8 * 4 / 3 + 4


# --- what is not a state -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "not a state of minato_gpu.DataLoader"),
        (
            {"version": 5},
            "a state of version 5; this minato_gpu reads version 6. Resume with the minato_gpu that saved it",
        ),
        ({"epoch": -1}, "'epoch' must be a whole number from 0"),
        ({"epoch": True}, "'epoch' must be a whole number"),
        ({"begun": 1}, "'begun' must be one of"),
        ({"generators": {"sampler": "AAAA"}}, "'sampler' holds no state of a torch.Generator"),
        ({"generators": {"sampler": "not base64!"}}, "must be a base64 string"),
        ({"global": "AAAA"}, "'global' holds no state of a torch.Generator"),
        ({"global": "not base64!"}, "'global' must be a base64 string"),
        ({"global": [1]}, "'global' must be a base64 string"),
        ({"generators": {"mine": ""}}, "may name 'loader', 'sampler' and 'default'"),
        ({"progress": {"batches": 2, "below": 7, "above": "BA=="}}, "pass in_order=False"),
        ({"progress": {"batches": 2, "below": 8, "above": "", "failed": -1}}, "'failed' must be a whole number"),
        ({"progress": {"batches": 2, "below": 8, "above": "", "failed": True}}, "'failed' must be a whole number"),
        ({"kind": "iterable"}, "of a data set of kind 'iterable'"),
        ({"source": {**_STATES["replay"]["source"], "order_drawn": 1}}, "'order_drawn' must be one of"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    loader = _loader("replay")
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict({**_STATES["replay"], **change})
    assert sum(len(batch) for batch in loader) == 24, "a state that is refused changes nothing"


_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to every part of a state."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(below for key, part in parts for below in _paths(part, (*path, key)))]


def _with(value: Any, path: tuple[Any, ...], junk: Any) -> Any:
    if not path:
        return junk
    out = copy.copy(value)
    out[path[0]] = _with(value[path[0]], path[1:], junk)
    return out


@st.composite
def _damaged(draw: st.DrawFn) -> tuple[str, Any]:
    kind = draw(st.sampled_from([*_KINDS, "merged"]))
    state = _MERGED if kind == "merged" else _STATES[kind]
    for _ in range(draw(st.integers(1, 3))):
        state = _with(state, draw(st.sampled_from(_paths(state))), draw(_JUNK))
    return ("ranks" if kind == "merged" else kind), state


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=400)
@given(_damaged())
@example(("keys", _with(_STATES["keys"], ("source", "drawn"), [[]])))
def test_damaged_states(case: tuple[str, Any]) -> None:
    """A damaged state is refused, or yields an epoch that ends: never another exception, never an endless one."""
    kind, state = case
    loader, count = _loader(kind), 0
    with contextlib.suppress(ValueError, _Users):
        _loaded(loader, state)
        count = sum(1 for _ in zip(range(1000), _guarded(loader), strict=False))
    assert count < 1000


class _Users(Exception):
    """Raised by the test's own sampler or data set, for what only they can check; or for a state that is no dict."""


def _loaded(loader: Any, state: Any) -> None:
    try:
        loader.load_state_dict(state)
    except TypeError as error:
        raise (_Users if "takes what state_dict" in str(error) else AssertionError)(str(error)) from error


def _guarded(loader: Any) -> Any:
    """The loader's batches. A stored key or a sampler's own state may be anything that its owner does not take."""
    try:
        iterator = iter(loader)
        yield from iterator
    except (TypeError, IndexError, KeyError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        ours = any(f"minato_gpu/{room}" in last for room in ("checkpoint", "sampling"))
        raise (AssertionError if ours else _Users)(str(error)) from error


@given(_JUNK)
def test_junk(junk: Any) -> None:
    if junk == {}:
        return
    with pytest.raises((ValueError, TypeError), match="state"):
        _loader("replay").load_state_dict(junk)


class _Level(IntEnum):
    LOW = 3


class _Word(str):
    pass


@pytest.mark.parametrize(
    "key",
    [
        *(np.int8(-3), np.uint64(1 << 63), np.float64(0.1), np.float32(0.1), np.float16(2.5), np.bool_(True)),
        *(np.str_("word"), np.bytes_(b"bytes"), _Level.LOW, _Word("word")),
        *((np.int64(3), [np.str_("a"), None]), ("same", "same"), [1, (2.5, np.float32(2.5))], ()),
    ],
    ids=repr,
)
def test_keys_of_other_classes(key: Any) -> None:
    """NumPy's numbers come back as they were, others as Python's own; and a sample's draws, which derive from the
    digest, stay what they were."""
    plain = s.plain_key(key)
    file = io.BytesIO()
    torch.save(plain, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == plain
    back = s.key_of(json.loads(json.dumps(plain)))
    assert back == key and key_digest(back) == key_digest(key)
    assert type(back) is type(key) or isinstance(key, (str, bytes, IntEnum))
    assert not isinstance(key, tuple) or [*map(type, back)] == [*map(type, key)]


def test_a_key_that_could_not_be_loaded_is_not_stored() -> None:
    key: Any = 1
    for _ in range(8):
        key = (key,)
    assert s.key_of(s.plain_key(key)) == key
    with pytest.raises(ValueError, match="8 deep at most"):
        s.plain_key([key])


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
