"""The epochs after a resume where no generator was given: torch's global one yields their orders, in the main process.

Without workers the data set draws there too. A sampler of the user's own may draw its order from any global generator.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler

from minato_gpu import DataLoader
from tests.contracts import resume_global_program
from tests.contracts.resume_global_program import EPOCHS, make, seed, trained
from tests.contracts.resuming import DATA, after, generator, loader_of, through_json, values
from tests.contracts.samplers import KeepsPlace, Unknown
from tests.support import programs

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
