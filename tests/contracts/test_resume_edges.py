"""Save and resume where something is out of the ordinary: other draws in between, errors, odd keys, damaged states."""

from __future__ import annotations

import base64
import gc
import json
import weakref
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from minato_gpu import DataLoader
from minato_gpu.resumption import Resumption
from tests.contracts.datasets import Made, Streams, draw, rows
from tests.contracts.test_resume import Counting, Unknown, generator, through_json
from tests.raising import error_of

_DATA: Any = list(range(40))


def _loader(sampler: Any = None, **more: Any) -> Any:
    return DataLoader(_DATA, 4, sampler=sampler, **more)


def _values(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


def _after(loader: Any, batches: int) -> Any:
    """The state of a loader after so many batches of an epoch."""
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    return through_json(loader.state_dict())


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


class RaisesOnce:
    """A sampler whose iterator raises when it comes to ``at``, and goes on after that, or after so many times."""

    def __init__(self, at: int, times: int = 1) -> None:
        self.at = at
        self.times = times

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Any:
        return _RaisesOnce(self.at, self.times)


class _RaisesOnce:
    def __init__(self, bad: int, times: int) -> None:
        self.next, self.bad, self.times = 0, bad, times

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        if self.next == self.bad and self.times:
            self.times -= 1
            raise OSError("the index server is away")
        if self.next == 40:
            raise StopIteration
        self.next += 1
        return self.next - 1


# --- where the generators stand ----------------------------------------------------------------------------------


def test_asked_before_it_goes_on() -> None:
    """Between load_state_dict and iter a state is the one that was loaded, and no other."""
    state = _after(_loader(), 5)
    for loader in (_loader(), _loader()):
        list(loader)
        loader.load_state_dict(state)
        assert through_json(loader.state_dict()) == state
        with pytest.raises(ValueError, match="ahead=1: nothing has been delivered since load_state_dict"):
            loader.state_dict(ahead=1)
        assert len(list(loader)) == 5


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("batches", [0, 3])
def test_two_loaders_that_draw_from_one_generator(batches: int, shared: bool) -> None:
    """Both iterators are made before either draws its order: torch's global generator, or one of the user's."""

    def make() -> list[Any]:
        torch.manual_seed(0)
        one = generator() if shared else None
        return [_loader(shuffle=True, generator=one) for _ in range(2)]

    loaders = make()
    together = zip(*loaders, strict=True)
    first = [[batch.tolist() for batch in next(together)] for _ in range(batches)]
    states = [through_json(loader.state_dict()) for loader in loaders]
    rest = [[batch.tolist() for batch in pair] for pair in together]
    following = [_values(loader) for loader in loaders] if shared else []
    resumed = make()
    for loader, state in zip(resumed, states, strict=True):
        loader.load_state_dict(state)
    got = [[batch.tolist() for batch in pair] for pair in zip(*resumed, strict=True)]
    if batches:
        assert got == rest and ([_values(loader) for loader in resumed] if shared else []) == following
    for which in range(2):
        assert sorted(index for pair in first + got for index in pair[which]) == _DATA


class Permuted(Unknown):
    """A sampler of the user's own with a generator, which it draws from in every epoch."""

    def __init__(self, own: torch.Generator) -> None:
        super().__init__()
        self.generator = own

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(40, generator=self.generator).tolist())

    def __len__(self) -> int:
        return 40


@pytest.mark.parametrize("shared", [False, True])
def test_epochs_after_a_stored_order(shared: bool) -> None:
    """What is stored is not drawn again: the generator stands where it did once the order had been drawn."""

    def make() -> Any:
        own = generator()
        return _loader(Permuted(own), generator=own if shared else generator(3))

    whole = make()
    reference, seeds = [], []
    for _ in range(3):
        reference.append(_values(whole))
        seeds.append(whole._standing.state(0)["seed"])
    for step in (0, 3, 10):
        loader = make()
        state = _after(loader, step)
        resumed = make()
        resumed.load_state_dict(state)
        state = _after(resumed, 0)  # and saved once more
        resumed = make()
        resumed.load_state_dict(state)
        found = []
        for epoch in range(3):
            found.append(_values(resumed))
            assert resumed._standing.state(0)["seed"] == seeds[epoch]
        assert found == [reference[0][step:], *reference[1:]]


@pytest.mark.parametrize("persistent", [False, True])
def test_after_set_epoch_samples_have_the_next_epochs_content(persistent: bool) -> None:
    def make() -> Any:
        data = Made(8, draw)
        arguments: dict[str, Any] = {"num_workers": 1, "persistent_workers": persistent, "generator": generator()}
        return DataLoader(data, 4, sampler=DistributedSampler(data, 1, 0), **arguments)

    whole = make()
    list(whole)
    whole.sampler.set_epoch(1)
    reference = [rows([batch]) for batch in whole]
    resumed = make()
    resumed.load_state_dict(_after(make(), 1))
    resumed.sampler.set_epoch(1)
    with pytest.warns(UserWarning, match=r"set_epoch\(1\) has been called since"):
        iterator = iter(resumed)
    assert [rows([batch]) for batch in iterator] == reference
    assert resumed.state_dict()["epoch"] == 2


# --- errors on the way to the consumer ---------------------------------------------------------------------------


def _going_on(iterator: Iterator[Any], times: int, error: type[Exception]) -> int:
    """Ask so many times; returns how often it raised."""
    raised = 0
    for _ in range(times):
        try:
            next(iterator)
        except error:
            raised += 1
    return raised


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_does_not_reach_the_device(workers: int) -> None:
    """As after any other error, a consumer that goes on has dealt with it, and later states can be loaded."""
    loader = _loader(num_workers=workers)
    move, calls = loader._to_device, []

    def full(batch: Any, number: int = 0) -> Any:
        calls.append(batch)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return move(batch, number)

    loader._to_device = full
    iterator = iter(loader)
    assert _going_on(iterator, 3, RuntimeError) == 1
    resumed = _loader(num_workers=workers)
    resumed.load_state_dict(through_json(loader.state_dict()))
    assert next(iter(resumed)).tolist() == [8, 9, 10, 11], "the consumer does not have it yet"
    assert _going_on(iterator, 3, RuntimeError) == 0
    assert loader.state_dict()["progress"] == {"batches": 6, "below": 24, "above": ""}
    resumed.load_state_dict(through_json(loader.state_dict()))
    assert [index for batch in resumed for index in batch.tolist()] == _DATA[24:]


def _all_of(iterator: Iterator[Any], error: type[Exception]) -> tuple[list[Any], list[int]]:
    """What comes until the end, and after how many batches each error did; it is asked on after each."""
    got: list[Any] = []
    raised: list[int] = []
    while True:
        try:
            got.append(torch.as_tensor(next(iterator)).tolist())
        except StopIteration:
            return got, raised
        except error:
            raised.append(len(got))


def test_the_next_epoch_cannot_be_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch at hand comes first; the next epoch then begins as if nothing had been tried."""
    loader = _loader(num_workers=1, epochs=2)
    iterator = iter(loader)
    next(iterator)
    prefetch = loader._engine.prefetch

    def raises(source: Any) -> None:
        prefetch(source)
        raise OSError("the index server is away")

    monkeypatch.setattr(loader._engine, "prefetch", raises)
    got, raised = _all_of(iterator, OSError)
    assert [index for batch in got for index in batch] == _DATA[4:]
    assert len(raised) == 1 and raised[0] > 0, "after the batch that was at hand"
    assert [index for batch in loader for index in batch.tolist()] == _DATA


class Away:
    """What a sampler draws from. Its length cannot be had while it is ``away``."""

    def __init__(self) -> None:
        self.away = False

    def __len__(self) -> int:
        if self.away:
            raise OSError("the index server is away")
        return 40


@pytest.mark.parametrize("order", [{}, {"in_order": False}], ids=["in order", "bounded"])
def test_a_sampler_that_raises_for_the_next_epoch(order: dict[str, Any]) -> None:
    """Every batch of this one comes, one of them and then the error; the next epoch is whole."""
    source = Away()
    loader = _loader(SequentialSampler(source), num_workers=1, epochs=2, **order)
    iterator = iter(loader)
    first = next(iterator).tolist()
    source.away = True
    got, raised = _all_of(iterator, OSError)
    source.away = False
    assert sorted(index for batch in [first, *got] for index in batch) == _DATA
    assert len(raised) == 1 and raised[0] > 0
    assert sorted(index for batch in loader for index in batch.tolist()) == _DATA
    assert loader.stats()["speculation"] == {"epochs_prepared": 0, "epochs_discarded": 0}


@pytest.mark.parametrize("order", [{}, {"in_order": False}], ids=["in order", "bounded"])
@pytest.mark.parametrize("at", [8, 39, 40])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_sampler_that_raises_once(workers: int, at: int, order: dict[str, Any]) -> None:
    """No batch is lost: the one that was at hand when the loader drew ahead comes before the error."""
    loader = DataLoader(_DATA, None, sampler=RaisesOnce(at), num_workers=workers, **order)
    iterator = iter(loader)
    first = next(iterator)
    got, raised = _all_of(iterator, OSError)
    assert sorted([int(first), *got]) == _DATA
    assert len(raised) == 1 and raised[0] > 0


def test_an_error_that_nobody_asks_for_keeps_nothing_alive() -> None:
    """And who asks is told where it came from."""
    loader = DataLoader(_DATA, None, sampler=RaisesOnce(8), num_workers=1)
    iterator = iter(loader)
    engine = iterator._engine
    while engine._epochs.raised.kept is None:
        next(iterator)
    text = "".join(engine._epochs.raised.kept.__notes__)
    assert "index server is away" in text and "in __next__" in text and "test_resume_edges.py" in text
    left = weakref.ref(iterator)
    gc.disable()
    try:
        del iterator
        assert left() is None and engine.closed
    finally:
        gc.enable()


@pytest.mark.parametrize("batches", [7, 9, 12])
def test_a_state_after_a_sampler_raised(batches: int) -> None:
    """What had been delivered by then, whether the error has come or not."""
    loader = DataLoader(_DATA, None, sampler=RaisesOnce(8), num_workers=1)
    iterator = iter(loader)
    raised = _going_on(iterator, batches, OSError)
    done = batches - raised
    assert loader.state_dict()["progress"] == {"batches": done, "below": done, "above": ""}


def test_an_interrupt_while_it_draws_comes_at_once() -> None:
    """And a save says that the consumer does not have the batch."""

    class Interrupted(RaisesOnce):
        def __iter__(self) -> Any:
            for index in range(40):
                if index == 8:
                    raise KeyboardInterrupt
                yield index

    loader = DataLoader(_DATA, None, sampler=Interrupted(8), num_workers=1)
    iterator, got = iter(loader), list[int]()
    error_of(KeyboardInterrupt, got.extend, iterator)
    assert got == list(range(len(got))) and len(got) < 8
    assert loader.state_dict()["progress"]["below"] == len(got)


def test_a_sampler_that_raises_longer_than_batches_are_at_hand() -> None:
    """It is asked again each time: nobody waits for a batch that has not been drawn."""
    loader: Any = DataLoader(_DATA, None, sampler=RaisesOnce(8, times=12), num_workers=1, timeout=10)
    iterator = iter(loader)
    assert _going_on(iterator, 30, OSError) == 12
    assert loader.state_dict()["progress"] == {"batches": 18, "below": 18, "above": ""}


class Numbers(IterableDataset[Any]):
    """A stream with a state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 20:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class NumbersAgain(IterableDataset[Any]):
    """The same without one."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


def _refuses(samples: list[int]) -> list[int]:
    if 5 in samples:
        raise ValueError("five")
    return samples


@pytest.mark.parametrize("data", [Numbers, NumbersAgain])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_of_a_stream_that_cannot_be_joined(workers: int, data: Any) -> None:
    """The stream stands after it, whether it has a state of its own or is read again."""

    def make() -> Any:
        return DataLoader(data(), 4, num_workers=workers, collate_fn=_refuses)

    for more in (0, 1):
        loader = make()
        iterator = iter(loader)
        assert _going_on(iterator, 2, ValueError) == 1
        for _ in range(more):
            next(iterator)
        state = through_json(loader.state_dict())
        # whose error has just been raised is tried again; a worker whose consumer went on is past it
        (own,) = state["source"]["streams"]
        assert own["batches"] == (1 if more == 0 else 3)
        assert (own["state"] is not None) == (data is Numbers)
        if more:
            resumed = make()
            resumed.load_state_dict(state)
            assert list(resumed) == [[12, 13, 14, 15], [16, 17, 18, 19]]
    assert next(iterator) == [12, 13, 14, 15]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_state_right_after_a_failed_batch_is_the_streams_own(workers: int) -> None:
    """``ahead`` counts the batch that failed as one: its own state came with it."""
    loader = DataLoader(Numbers(), 4, num_workers=workers, collate_fn=_refuses)
    iterator = iter(loader)
    assert _going_on(iterator, 3, ValueError) == 1
    (own,) = loader.state_dict(ahead=1)["source"]["streams"]
    assert own["batches"] == 2 and own["state"] == {"of": "dataset", "state": {"at": 8}}


# --- a sampler's own state, saved more than once ------------------------------------------------------------------


def test_a_state_from_the_middle_of_a_batch_is_taken_up_twice() -> None:
    """What was drawn to get there counts as not drawn: the sampler's state is the one before it."""
    loader = DataLoader(_DATA, 4, sampler=Counting(), num_workers=1, in_order=False)
    state = _after(loader, 1)
    assert state["progress"]["batches"] == 1
    state["progress"] = {"batches": 1, "below": 2, "above": base64.b64encode(b"\x0c").decode()}  # 0, 1, 4 and 5
    state["source"].update(place=0, position=0, state={"sampler": {"yielded": 0}, "iterator": None}, planes=[])
    rest = []
    for _ in range(3):
        loader = DataLoader(_DATA, 4, sampler=Counting(), num_workers=1, in_order=False)
        loader.load_state_dict(state)
        iterator = iter(loader)
        state = through_json(loader.state_dict())
        rest = [index for batch in iterator for index in batch.tolist()]
    order = list(Counting())
    assert sorted(rest) == sorted([*order[2:4], *order[6:]])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_with_a_state_at_its_end_is_saved_again(workers: int) -> None:
    def make() -> Any:
        return DataLoader(_DATA, 4, sampler=Counting(), num_workers=workers)

    state = _after(make(), 6)
    for _ in range(3):
        loader = make()
        loader.load_state_dict(state)
        state = _after(loader, 0)
    resumed = make()
    resumed.load_state_dict(state)
    last, following = _values(resumed), _values(resumed)
    assert last == [] and following == _values(make())


# --- keys --------------------------------------------------------------------------------------------------------


def test_a_stored_order_at_every_step_and_ahead() -> None:
    """Every save of one run, also as it was some batches ago: what is left, and how often each key has come."""
    order = [*range(20), 3, 7, 3, 3]

    class Repeating(Unknown):
        def __iter__(self) -> Iterator[int]:
            return iter(order)

        def __len__(self) -> int:
            return len(order)

    loader: Any = DataLoader(Made(20, draw), 4, sampler=Repeating(), num_workers=1)
    counts = [order[:at].count(key) for at, key in enumerate(order)]
    iterator = iter(loader)
    for step in range(1, 7):
        next(iterator)
        for ahead in range(min(step, 3)):
            source = loader.state_dict(ahead=ahead)["source"]
            at = 4 * (step - ahead)
            assert (source["place"], source["position"]) == (step - ahead, at)
            assert [key for batch in source["batches"] for key in batch] == order[at:]
            assert source["occurrences"] == counts[at:]


def test_what_a_save_of_a_stored_order_costs() -> None:
    """All but the first, which draws the order and makes it plain, cost far less than writing the state as JSON."""
    many: Any = list(range(50_000))

    class Large(Unknown):
        def __iter__(self) -> Iterator[int]:
            return iter(many)

    loader: Any = DataLoader(many, 64, sampler=Large())
    saves, dumps = [], []
    for _, _batch in zip(range(21), loader, strict=False):
        begin = perf_counter()
        state = loader.state_dict()
        saved = perf_counter()
        json.dumps(state)
        saves.append(saved - begin)
        dumps.append(perf_counter() - saved)
    assert 4 * sorted(saves)[10] < sorted(dumps)[10]


class Indices(Counting):
    """NumPy's integers, with repeats, and a state."""

    def __iter__(self) -> Iterator[Any]:
        for index in super().__iter__():
            yield np.int64(index)


class IndicesWithoutState(Unknown):
    def __iter__(self) -> Iterator[Any]:
        return iter([np.int64(index) for index in super().__iter__()])


class Pairs(Unknown):
    """Keys of several parts, some of which are the same object."""

    def __iter__(self) -> Iterator[Any]:
        word = "left"
        return iter([(word, word, np.int64(at % 7), np.float32(0.1), (np.str_("x"), True)) for at in range(23)])


@pytest.mark.parametrize("sampler", [Indices, IndicesWithoutState, Pairs])
def test_keys_of_other_classes_draw_the_same_after_a_resume(sampler: Any) -> None:
    def make() -> Any:
        return DataLoader(
            Made(20, draw), 4, sampler=sampler(), num_workers=1, generator=generator(), collate_fn=lambda batch: batch
        )

    def content(batches: Any) -> list[Any]:
        return [sample[1:] for batch in batches for sample in batch]

    reference = content(make())
    loader = make()
    state = _after(loader, 4)
    resumed = make()
    resumed.load_state_dict(state)
    assert content(resumed) == reference[16:]


# --- damaged states ----------------------------------------------------------------------------------------------


def _damaged(state: Any, progress: dict[str, Any] | None = None, /, **source: Any) -> Any:
    return {**state, "progress": progress or state["progress"], "source": {**state["source"], **source}}


def _bits(lo: int, hi: int) -> str:
    value = ((1 << (hi - lo)) - 1) << lo
    return base64.b64encode(value.to_bytes((hi + 7) // 8, "little")).decode()


def test_delivered_beyond_the_end() -> None:
    """Such an epoch would never come to its end."""
    progress = {"batches": 20, "below": 0, "above": _bits(1000, 1080)}
    samplers: list[Any] = [None, RandomSampler(_DATA), DistributedSampler(_DATA, 2, 0)]
    for sampler in samplers:
        loader = _loader(sampler, num_workers=1, in_order=False)
        with pytest.raises(ValueError, match="delivered up to position 1080, and the sampler ends at 40"):
            loader.load_state_dict(_damaged(_after(_loader(sampler), 1), progress))
    progress = {"batches": 22, "below": 8, "above": _bits(1000, 1080)}
    loader = DataLoader(_DATA[:20], 4, sampler=Unknown(), num_workers=1, in_order=False)
    with pytest.raises(ValueError, match="delivered up to position 1088, and the stored order ends after 6 at 23"):
        loader.load_state_dict(_damaged(_after(DataLoader(_DATA[:20], 4, sampler=Unknown()), 2), progress))


@pytest.mark.parametrize("progress", [{"batches": 8, "below": 2, "above": _bits(1, 31)}, None])
def test_delivered_beyond_an_end_that_only_the_sampler_knows(progress: Any) -> None:
    """A sampler with a state: its epoch ends in an error, not never. So do two ranks' shares, and lists of batches."""
    if progress is not None:
        sampler: Any = {"batch_size": 4, "sampler": Counting()}
        source = {"place": 0, "position": 0, "planes": [], "state": {"sampler": {"yielded": 0}, "iterator": None}}
    else:
        sampler = {"batch_sampler": [[1, 2], [3, 4], [5]]}
        progress, source = {"batches": 9, "below": 2, "above": _bits(1, 3)}, {}
    state = _damaged(_after(DataLoader(_DATA, **sampler), 1), progress, **source)
    loader: Any = DataLoader(_DATA, **sampler, num_workers=1, in_order=False, timeout=20)
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match="but the sampler ends"):
        list(loader)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"place": 10**6}, "'place' must be a whole number from 0 to 3, got 1000000"),
        ({"place": 1}, "place 1 of batches of 4 is not at position 12"),
        ({"position": 13}, "'position' must be a whole number from 0 to 12, got 13"),
        ({"batches": []}, None),
    ],
)
def test_a_stored_order_that_begins_elsewhere(source: dict[str, Any], message: str | None) -> None:
    loader = _loader(RaisesOnce(-1), num_workers=1, timeout=20)
    state = _damaged(_after(_loader(RaisesOnce(-1)), 3), **source)
    if message is None:
        loader.load_state_dict(state)
        assert list(loader) == []
    else:
        with pytest.raises(ValueError, match=message):
            loader.load_state_dict(state)


def test_an_endless_sampler_is_not_drawn_to_a_far_line() -> None:
    """What is delivered before the sampler's own state is at most the first part of its next batch."""
    state = _damaged(_after(_loader(Endless()), 3), {"batches": 10**12, "below": 4 * 10**12, "above": ""})
    loader = _loader(Endless())
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match="its order begins long before"):
        iter(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_is_too_short(workers: int) -> None:
    state = _after(DataLoader(Streams([9]), 4, num_workers=workers), 2)
    for batches in (3, 4):
        state["source"]["batches"] = state["source"]["streams"][0]["batches"] = batches
        loader: Any = DataLoader(Streams([9]), 4, num_workers=workers)
        loader.load_state_dict(state)
        if batches == 3:  # the last one had a single sample
            assert list(loader) == []
        else:
            with pytest.raises(ValueError, match="4 batches of this stream delivered, but it yields only 9 samples"):
                list(loader)


def test_a_million_gaps() -> None:
    """Refused before they are taken apart: a span of Python's takes hundreds of times its bits."""
    state = _after(_loader(), 1)
    loader = _loader(num_workers=1, in_order=False)
    for junk, message in ((b"\xaa" * (1 << 20), "'above' has 4194304 spans"), (bytes(2 << 20), "longer than any")):
        above = base64.b64encode(junk).decode()
        with pytest.raises(ValueError, match=message):
            Resumption(loader, _damaged(state, {"batches": 1, "below": 0, "above": above}))
    assert json.dumps(loader.state_dict())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("goes_on", [False, True], ids=["left out", "raised"])
def test_batches_that_never_came_are_not_counted_as_read_ahead(workers: int, goes_on: bool) -> None:
    """``ahead`` batches are those that the consumer has had: one of bad samples alone was never handed over."""

    def make() -> Any:
        data = Made(40, lambda n: 1 // 0 if 8 <= n < 12 else torch.tensor(n))
        return DataLoader(data, 4, num_workers=workers, on_error="raise" if goes_on else "skip")

    loader = make()
    iterator, got = iter(loader), list[Any]()
    while len(got) < 4:
        try:
            got.append(next(iterator).tolist())
        except ZeroDivisionError:
            continue
    assert got == [[0, 1, 2, 3], [4, 5, 6, 7], [12, 13, 14, 15], [16, 17, 18, 19]]
    for ahead, used in ((1, 3), (2, 2), (3, 1), (4, 0)):
        resumed = make()
        resumed.load_state_dict(through_json(loader.state_dict(ahead=ahead)))
        assert next(iter(resumed)).tolist() == got[used]
    with pytest.raises(ValueError, match="the last 4 can be taken back"):
        loader.state_dict(ahead=5)
