"""The epochs after a resume where no generator was given: torch's global one yields their orders, in the main process.

Without workers the data set draws there too. The global generators are the user's: see process_generators.py.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler, SubsetRandomSampler

from minato_gpu import DataLoader, merge_state_dicts
from minato_gpu.checkpoint import process_generators
from tests import programs
from tests.contracts import resume_global_program
from tests.contracts.datasets import Made
from tests.contracts.resume_global_program import EPOCHS, SAMPLES, make, seed, trained
from tests.contracts.resuming import DATA, after, generator, loader_of, through_json, values
from tests.contracts.samplers import KeepsPlace, Unknown

_WAYS: dict[str, dict[str, Any]] = {
    "inline": {},
    "processes": {"num_workers": 2},
    "processes that stay": {"num_workers": 2, "persistent_workers": True},
    "declared epochs": {"num_workers": 1, "epochs": EPOCHS},
    "bounded": {"num_workers": 2, "in_order": False},
    "threads": {"num_workers": 2, "worker_kind": "thread"},
    "threads that stay, bounded": {
        "num_workers": 2,
        "worker_kind": "thread",
        "persistent_workers": True,
        "in_order": False,
    },
}
_POINTS: list[list[Any]] = [[0, 0], [0, 3], [0, 5], [0, "end"], [1, 0], [1, 2], [2, "end"]]


@cache
def _reference(way: str) -> Any:
    seed(5)
    return trained(make(**_WAYS[way]))[0]


def _comparable(way: str, got: list[Any]) -> Any:
    """Out of order: an epoch's samples, and what training drew."""
    if _WAYS[way].get("in_order", True):
        return got
    samples = [sorted(row for number, rows, _ in got if number == epoch for row in rows) for epoch in range(EPOCHS)]
    return samples, [drawn for *_, drawn in got]


@pytest.mark.parametrize("way", _WAYS)
def test_later_epochs(way: str) -> None:
    """Before an epoch's first batch, within it and at its end: what follows is what the uninterrupted run had."""
    for stop in _POINTS if way in ("inline", "threads") else _POINTS[way == "bounded" :: 2]:  # forks take long
        seed(5)
        got, state = trained(make(**_WAYS[way]), stop=stop)
        seed(99)
        rest, _ = trained(make(**_WAYS[way]), through_json(state))
        assert _comparable(way, got + rest) == _comparable(way, _reference(way)), stop


@pytest.mark.parametrize("way", ["inline", "processes", "threads"])
@pytest.mark.parametrize("ahead", [1, 3])
def test_as_it_was_batches_ago(way: str, ahead: int) -> None:
    """With ``ahead`` torch's generator alone, as it was before those batches, for which training draws again."""
    loaders = {"draws": way != "inline", **_WAYS[way]}
    seed(5)
    reference, _ = trained(make(**loaders))
    for stop in ([0, 3], [1, 4]):
        seed(5)
        got, state = trained(make(**loaders), stop=stop, ahead=ahead)
        assert set(state["global"]) == {"torch"}
        seed(99)
        rest, _ = trained(make(**loaders), through_json(state))
        assert got + rest == reference, stop


@pytest.mark.parametrize(
    "way", ["inline", "processes that stay", pytest.param("threads", marks=pytest.mark.on_request)]
)
def test_in_fresh_processes(way: str) -> None:
    """Each goes on from what the one before it saved; none but the first sets a seed."""

    def in_a_process(number: int | None, state: Any, stop: Any) -> Any:
        given = json.dumps([number, state, stop, 0])
        return json.loads(programs.run(resume_global_program.__name__, json.dumps(_WAYS[way]), given=given))

    found: list[Any] = []
    number: int | None = 5
    state: Any = None
    for stop in ([0, 2], [0, "end"], [1, 0], [2, 4], None):
        got, state = in_a_process(number, state, stop)
        found += got
        number = None
    assert found == _reference(way)


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: RandomSampler(DATA),
        lambda: RandomSampler(DATA, True, 30),
        lambda: SubsetRandomSampler(DATA),
        lambda: _Permuted(),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_the_order_is_drawn_once(sampler: Callable[[], Any], workers: int) -> None:
    """Without workers a sampler draws when the first batch is asked for, and a state may come before or after that."""

    def new() -> Any:
        return loader_of(sampler(), num_workers=workers)

    torch.manual_seed(3)
    loader = new()
    reference = [values(loader) for _ in range(2)]
    for step in (0, 1, 2):
        for ahead in {0, step}:
            torch.manual_seed(3)
            loader = new()
            iterator = iter(loader)
            for _ in range(step):
                next(iterator)
            state = through_json(loader.state_dict(ahead=ahead))
            resumed = new()
            resumed.load_state_dict(state)
            assert [values(resumed) for _ in range(2)] == [reference[0][step - ahead :], reference[1]], (step, ahead)


class _Permuted(Unknown):
    """Of the user's own, drawn from the global generator."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(40).tolist())

    def __len__(self) -> int:
        return 40


@pytest.mark.parametrize("kind", ["workers that stay", "own seeds"])
@pytest.mark.parametrize(("stop", "old"), [(0, False), (1, False), (1, True)])
def test_who_seeds_alike_before_an_epoch_and_before_a_save(kind: str, stop: int, old: bool) -> None:
    """The generator is then as it was when the epoch began, whether its order has been drawn since or not. Of an
    earlier version's state that is known by what was delivered."""
    stay = kind == "workers that stay"
    more: dict[str, Any] = {"num_workers": 1, "persistent_workers": True} if stay else {"generator": generator()}

    def begun() -> tuple[Any, Iterator[Any]]:
        torch.manual_seed(7)
        loader = loader_of(RandomSampler(DATA), **more)
        list(loader)  # workers that stay have their seed by now: nothing else is drawn as the next epoch begins
        torch.manual_seed(42)
        iterator = iter(loader)
        for _ in range(stop):
            next(iterator)
        torch.manual_seed(42)
        return loader, iterator

    def rest(loader: Any, iterator: Iterator[Any]) -> Any:
        return [(batch.tolist(), torch.rand(()).item()) for batch in iterator], values(loader)

    reference = rest(*begun())
    state = through_json(begun()[0].state_dict())
    assert state["source"]["order_drawn"] is (stay or stop > 0)
    if old:
        del state["source"]["order_drawn"]
    torch.manual_seed(9)
    resumed = loader_of(RandomSampler(DATA), **more)
    resumed.load_state_dict(state)
    assert rest(resumed, iter(resumed)) == reference


_SHUFFLES: dict[str, Callable[[Any], None]] = {"python": random.shuffle, "numpy": np.random.shuffle}


class _ShuffledBy(Unknown):
    """Of the user's own: it draws its order, as its first key is asked for, from a global generator but torch's."""

    def __init__(self, drawn_from: str, own: torch.Generator | None = None) -> None:
        super().__init__()
        self.shuffle = _SHUFFLES[drawn_from]
        self.generator = own

    def __iter__(self) -> Iterator[int]:
        order = list(range(40))
        self.shuffle(order)
        yield from order

    def __len__(self) -> int:
        return 40


def _goes_on_as_it_would_have(new: Callable[[], Any], *stops: int | str) -> None:
    """Three epochs, saved in the second one after so many batches, or at its end."""
    seed(5)
    loader = new()
    reference = [values(loader) for _ in range(3)]
    for stop in stops:
        seed(5)
        loader = new()
        first = values(loader)
        iterator = iter(loader)
        got = values(iterator) if stop == "end" else [next(iterator).tolist() for _ in range(int(stop))]
        state = through_json(loader.state_dict())
        seed(99)
        resumed = new()
        resumed.load_state_dict(state)
        rest = [] if stop == "end" else values(resumed)
        assert [first, got + rest, values(resumed)] == reference, stop


@pytest.mark.parametrize("drawn_from", _SHUFFLES)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("own", [False, True])
def test_a_sampler_that_draws_from_pythons_or_numpys(drawn_from: str, workers: int, own: bool) -> None:
    """It does so in the main process, with workers too; that it has a generator says nothing of what else it draws."""

    def new() -> Any:
        given = generator() if own else None
        return loader_of(_ShuffledBy(drawn_from, given), num_workers=workers, generator=given)

    _goes_on_as_it_would_have(new, 0, 1, "end")


class _AtOnce:
    """A batch sampler of the user's own that draws its order as it is iterated, from a global generator."""

    def __init__(self, drawn_from: str) -> None:
        self.drawn_from = drawn_from

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._order())

    def _order(self) -> list[list[int]]:
        order = list(range(20))
        if self.drawn_from == "torch":
            order = torch.randperm(20).tolist()
        else:
            _SHUFFLES[self.drawn_from](order)
        return [order[at : at + 4] for at in range(0, 20, 4)]

    def __len__(self) -> int:
        return 5


class _AtOnceWithState(_AtOnce):
    """The same, that goes on with the order of its state: what it has drawn beside that is not used."""

    left: list[list[int]] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        drawn = self._order()
        self.left = drawn if self.left is None else self.left
        return self._rest()

    def _rest(self) -> Iterator[list[int]]:
        while self.left:
            yield self.left.pop(0)
        self.left = None

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = state["left"]


@pytest.mark.parametrize("sampler", [_AtOnce, _AtOnceWithState])
@pytest.mark.parametrize("drawn_from", ["torch", *_SHUFFLES])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("own", [False, True])
def test_what_a_sampler_draws_as_it_is_taken_up_leaves_no_trace(
    sampler: Any, drawn_from: str, workers: int, own: bool
) -> None:
    """It is iterated for an order that had been drawn before the save. ``own``: seeds come from a generator."""

    def new() -> Any:
        more: dict[str, Any] = {"generator": generator()} if own else {}
        return DataLoader(DATA, batch_sampler=sampler(drawn_from), num_workers=workers, **more)

    _goes_on_as_it_would_have(new, 0, 1, 5, "end")


def test_other_workers_after_the_resume() -> None:
    seed(5)
    reference, _ = trained(make(draws=False))
    for before, then in ((0, 2), (2, 0)):
        for stop in ([0, 0], [0, 2], [1, "end"]):
            seed(5)
            got, state = trained(make(draws=False, num_workers=before), stop=stop)
            seed(99)
            rest, _ = trained(make(draws=False, num_workers=then), through_json(state))
            assert got + rest == reference, (before, stop)


# --- whose they are ----------------------------------------------------------------------------------------------


def _moved(move: Callable[[int], Any], caplog: pytest.LogCaptureFixture) -> tuple[list[str], list[str]]:
    """Which generators are not as in the state after ``iter()``, where ``move`` came before that; and what was said."""
    seed(1)
    loader = loader_of(shuffle=True)
    next(iter(loader))
    state = through_json(loader.state_dict())
    seed(2)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="minato_gpu"):
        for number in (7, 8):
            resumed = loader_of(shuffle=True)
            resumed.load_state_dict(state)
            move(number)
            there = process_generators.every()
            iter(resumed)
    saved, found = process_generators.checked(state["global"]), process_generators.every()
    assert all(found[name] in (saved[name], there[name]) for name in found)
    return [name for name in found if found[name] != saved[name]], [record.message for record in caplog.records]


def test_the_users_own_wins(caplog: pytest.LogCaptureFixture) -> None:
    """Of generators that moved after load_state_dict; each of the others goes back. Said once."""
    assert _moved(lambda _: None, caplog) == ([], [])
    moves: dict[str, Any] = {"torch": torch.manual_seed, "python": random.seed, "numpy": np.random.seed}
    for name, move in moves.items():
        which, said = _moved(move, caplog)
        assert which == [name] and len(said) == 1
        assert said[0].lower().startswith(f"{name}'s global generator") and "stays as it is" in said[0]


@pytest.mark.parametrize("kind", ["at iter", "state"])
def test_the_users_own_wins_for_a_stream(kind: str) -> None:
    """What is read again puts the others back, and not this one."""
    state = after(DataLoader(_STREAMS[kind](), 1, collate_fn=list), 0)
    seed(2)
    resumed: Any = DataLoader(_STREAMS[kind](), 1, collate_fn=list)
    resumed.load_state_dict(state)
    random.seed(7)
    own = process_generators.every()["python"]
    iter(resumed)
    assert process_generators.every() == {**process_generators.checked(state["global"]), "python": own}


def test_who_sets_it_to_the_same_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A script that keeps torch.get_rng_state() with the loader's state, which was once needed."""
    torch.manual_seed(1)
    loader = loader_of(shuffle=True, num_workers=1)
    next(iter(loader))
    state, own = loader.state_dict(), torch.get_rng_state()
    resumed = loader_of(shuffle=True, num_workers=1)
    resumed.load_state_dict(state)
    torch.set_rng_state(own)
    with caplog.at_level(logging.WARNING, logger="minato_gpu"):
        iter(resumed)
    assert torch.equal(torch.get_rng_state(), own) and not caplog.records


@pytest.mark.parametrize("workers", [0, 1])
def test_nobody_elses_moves(workers: int) -> None:
    """Saving moves none, nor does a loader that is given no state; load_state_dict alone moves none, either."""
    seed(1)
    loader = loader_of(range(40), num_workers=workers, generator=generator())
    before = process_generators.every()
    loader.load_state_dict({})
    states = [loader.state_dict()]
    for _ in loader:
        states += [loader.state_dict(), loader.state_dict(ahead=1)]
    states.append(loader.state_dict())
    for state in states:
        loader_of(range(40), num_workers=workers, generator=generator()).load_state_dict(state)
    assert process_generators.every() == before


@pytest.mark.parametrize(
    "sampler",
    [
        lambda own: RandomSampler(DATA, generator=own),
        lambda own: range(40),
        lambda own: DistributedSampler(DATA, 1, 0),
    ],
)
def test_with_a_generator_of_ones_own(sampler: Callable[[Any], Any]) -> None:
    """Nothing comes from the global one: it is in no state, and left alone. Without workers a data set may draw."""

    def state_of(own: Any, workers: int) -> Any:
        loader = loader_of(sampler(generator()), num_workers=workers, generator=own)
        before, state = loader.state_dict(), after(loader, 1)
        assert bool(before.get("global")) == bool(state.get("global"))
        return state

    assert list(state_of(None, 1)["global"]) == ["torch"] and len(state_of(generator(), 0)["global"]) == 3
    state = state_of(generator(), 1)
    assert "global" not in state
    state["global"] = state_of(None, 1)["global"]
    seed(2)
    before = process_generators.every()
    loader = loader_of(sampler(generator()), num_workers=1, generator=generator())
    loader.load_state_dict(state)
    iter(loader)
    assert process_generators.every() == before


def test_a_state_without_them() -> None:
    """As earlier versions saved it: none moves."""
    for state in (loader_of().state_dict(), after(loader_of(), 1)):
        del state["global"]
        seed(2)
        before = process_generators.every()
        loader = loader_of(num_workers=0, generator=generator())
        loader.load_state_dict(state)
        iter(loader)
        assert process_generators.every() == before


def test_another_kind_of_generator_in_numpys_place() -> None:
    """It is nobody's that a state could hold, and is left alone."""
    numpys: Any = np.random
    own = numpys.get_bit_generator()
    state = after(loader_of(), 1)
    try:
        numpys.set_bit_generator(np.random.PCG64(3))
        before = np.random.get_state(legacy=False)
        assert set(after(loader_of(), 1)["global"]) == {"torch", "python"}
        loader = loader_of()
        loader.load_state_dict(state)
        iter(loader)
        assert np.random.get_state(legacy=False) == before
    finally:
        numpys.set_bit_generator(own)


# --- iterable data sets without workers --------------------------------------------------------------------------


class _Shuffled(IterableDataset[Any]):
    """Draws its order as an epoch begins: in ``iter()``, or (``late``) with the first sample; and more with each."""

    def __init__(self, *, late: bool) -> None:
        self.late = late

    def __iter__(self) -> Iterator[Any]:
        return self._samples() if self.late else iter(self._rows(torch.randperm(20).tolist()))

    def _samples(self) -> Iterator[Any]:
        yield from self._rows(np.random.permutation(20).tolist())

    def _rows(self, order: list[int]) -> Iterator[Any]:
        for index in order:
            yield [index, random.gauss(0.0, 1.0), torch.rand(()).item()]


class _Stateful(_Shuffled):
    """One that knows how far it has come; its state is large, so that it is told every few batches only."""

    def __init__(self) -> None:
        super().__init__(late=True)
        self.order: list[int] = []
        self.large = "x" * (1 << 15)

    def _samples(self) -> Iterator[Any]:
        self.order = self.order or np.random.permutation(20).tolist()
        while self.order:
            yield next(self._rows([self.order.pop()]))

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order), "large": self.large}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = state["order"]


_STREAMS: dict[str, Callable[[], Any]] = {
    "at iter": lambda: _Shuffled(late=False),
    "late": lambda: _Shuffled(late=True),
    "state": _Stateful,
}


@pytest.mark.parametrize("kind", _STREAMS)
def test_a_stream_that_draws(kind: str) -> None:
    """Read again in the order that it had, and what comes then is drawn as it would have been."""

    def new() -> Any:
        return DataLoader(_STREAMS[kind](), 1, collate_fn=list)

    seed(5)
    loader = new()
    reference = [list(loader) for _ in range(3)]
    for stop in (0, 1, 17, 18, 20):
        seed(5)
        loader = new()
        iterator = iter(loader)
        first = [next(iterator) for _ in range(stop)]
        state = through_json(loader.state_dict())
        assert stop < 17 or len(first) == stop
        seed(99)
        resumed = new()
        resumed.load_state_dict(state)
        iterator = iter(resumed)
        again = through_json(resumed.state_dict())  # saved once more
        assert again["global"] == state["global"]
        assert [first + list(iterator), list(resumed), list(resumed)] == reference, stop
        seed(98)
        resumed = new()
        resumed.load_state_dict(again)
        assert [first + list(resumed), list(resumed)] == reference[:2], stop


# --- ranks -------------------------------------------------------------------------------------------------------


def _ranks(count: int) -> list[Any]:
    data = Made(SAMPLES, torch.tensor)
    return [DataLoader(data, 2, sampler=DistributedSampler(data, count, rank), num_workers=1) for rank in range(count)]


def _states(batches: int | None, *, alike: bool) -> tuple[list[Any], list[Any]]:
    """Of two ranks, and how their generators stood; None: before the first epoch."""
    states, generators = [], []
    for rank, loader in enumerate(_ranks(2)):
        torch.manual_seed(0 if alike else rank)
        states.append(through_json(loader.state_dict()) if batches is None else after(loader, batches))
        generators.append(torch.get_rng_state())
    return states, generators


def _resumed(state: Any, ranks: int) -> list[Any]:
    """How the generators of so many ranks stand once they go on."""
    found = []
    for loader in _ranks(ranks):
        torch.manual_seed(77)
        loader.load_state_dict(through_json(state))
        loader._session.take_pending()  # what iter() does first: it then may draw
        found.append(torch.get_rng_state())
    return found


@pytest.mark.parametrize("batches", [None, 0, 2])
def test_ranks(batches: int | None) -> None:
    """As many ranks: each its own. Others: where all stood alike; else they stay as they are, for equal ones on all
    ranks would be none that any of them had."""
    own = torch.random.manual_seed(77).get_state()
    states, generators = _states(batches, alike=False)
    merged = merge_state_dicts(states[::-1])
    assert _same(_resumed(merged, 2), generators)
    assert _same(_resumed(merged, 3), [own] * 3)
    states, generators = _states(batches, alike=True)
    merged = merge_state_dicts(states)
    assert _same(_resumed(merged, 2), generators) and _same(_resumed(merged, 3), generators[:1] * 3)


def test_a_state_of_another_rank() -> None:
    """Between epochs any rank may take it, but for its generator."""
    states, generators = _states(None, alike=False)
    assert _same(_resumed(states[1], 2), [torch.random.manual_seed(77).get_state(), generators[1]])


def _same(found: list[Any], expected: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("damage", [[1, 2], [{"torch": "x"}, {"torch": 1}], "x", {"torch": 1}])
def test_damaged_generators_of_ranks(damage: Any) -> None:
    states, _ = _states(1, alike=False)
    for loader in _ranks(2):
        with pytest.raises(ValueError, match=r"state: '(global|globals|torch)' must be"):
            loader.load_state_dict({**merge_state_dicts(states), "globals": damage})


def test_a_stateful_sampler() -> None:
    """Its order is its own; the seeds of the epochs come from the global generator."""
    seeds = []
    for stop in (None, 3):
        torch.manual_seed(4)
        loader: Any = loader_of(KeepsPlace(), num_workers=1)
        if stop is not None:
            state = after(loader, stop)
            torch.manual_seed(99)
            loader = loader_of(KeepsPlace(), num_workers=1)
            loader.load_state_dict(state)
        list(loader)
        list(loader)
        seeds.append(loader._session.progress.state(0)["seed"])
    assert seeds[0] == seeds[1]
