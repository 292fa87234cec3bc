"""Where generators stand after a resume, whose they are, and streams that draw from them."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler, SubsetRandomSampler

from minato_gpu import DataLoader
from minato_gpu.checkpoint import process_generators
from tests.contracts.datasets import Made, draw
from tests.contracts.resuming import DATA, after, generator, loader_of, through_json, values
from tests.contracts.samplers import Unknown


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("batches", [0, 3])
def test_two_loaders_that_draw_from_one_generator(batches: int, shared: bool) -> None:
    """Both iterators are made before either draws its order: torch's global generator, or one of the user's."""

    def make() -> list[Any]:
        torch.manual_seed(0)
        one = generator() if shared else None
        return [loader_of(shuffle=True, generator=one) for _ in range(2)]

    loaders = make()
    together = zip(*loaders, strict=True)
    first = [[batch.tolist() for batch in next(together)] for _ in range(batches)]
    states = [through_json(loader.state_dict()) for loader in loaders]
    rest = [[batch.tolist() for batch in pair] for pair in together]
    following = [values(loader) for loader in loaders] if shared else []
    resumed = make()
    for loader, state in zip(resumed, states, strict=True):
        loader.load_state_dict(state)
    got = [[batch.tolist() for batch in pair] for pair in zip(*resumed, strict=True)]
    if batches:
        assert got == rest and ([values(loader) for loader in resumed] if shared else []) == following
    for which in range(2):
        assert sorted(index for pair in first + got for index in pair[which]) == DATA


EPOCHS, SAMPLES, SIZE = 4, 20, 4


def seed(number: int) -> None:
    """Of all global generators."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def make(**more: Any) -> Any:
    """A loader that is given no generator; with threads its data set must not draw from global generators."""
    sample = draw if more.get("worker_kind") != "thread" else lambda index: [index]
    return DataLoader(Made(SAMPLES, sample), SIZE, collate_fn=list, **{"shuffle": True, **more})


def trained(loader: Any, state: Any = None, stop: Any = None) -> tuple[list[Any], Any]:
    """What training gets: epoch, batch and what it draws for it; and the loader's state.

    ``stop``: (epoch, batches of it that were delivered), or (epoch, "end") when the iterator has said so.
    """
    got: list[Any] = []
    first, at = 0, 0
    if state is not None:
        loader.load_state_dict(state)
        first, at = state["epoch"], state.get("progress", {}).get("batches", 0)
    for epoch in range(first, EPOCHS):
        iterator = iter(loader)
        while True:
            if stop == [epoch, at]:
                return got, loader.state_dict()
            batch = next(iterator, None)
            if batch is None:
                break
            at += 1
            got.append([epoch, [list(map(float, row)) for row in batch], torch.rand(()).item()])
        if stop == [epoch, "end"]:
            return got, loader.state_dict()
        at = 0
    return got, None


class Permuted(Unknown):
    """A sampler of the user's own with a generator, which it draws from in every epoch."""

    def __init__(self, own: torch.Generator) -> None:
        super().__init__()
        self.generator = own

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(40, generator=self.generator).tolist())

    def __len__(self) -> int:
        return 40


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


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: RandomSampler(DATA),
        lambda: RandomSampler(DATA, True, 30),
        lambda: SubsetRandomSampler(DATA),
        lambda: Permuted(torch.default_generator),
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


_DRAWS: dict[str, Callable[[int], int]] = {
    "python": random.randrange,
    "torch": lambda below: int(torch.randint(below, ())),
}


_ALL = list(range(24))


class Buffered(IterableDataset[Any]):
    """Numbers through a shuffle buffer."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        self.draw, self.numbers = draw, _ALL

    def __iter__(self) -> Iterator[int]:
        held: list[int] = []
        for number in self.numbers:
            held.append(number)
            if len(held) == 6:
                yield held.pop(self.draw(6))
        while held:
            yield held.pop(self.draw(len(held)))


def _mixed(samples: Any) -> Any:
    """Draws from all of them, as mixup does."""
    random.random()
    torch.rand(())
    return samples


def _drawing_once(samples: Any) -> Any:
    if samples == _ALL[:4]:
        return _mixed(samples)
    return _mixed(_mixed(samples))


def _trained(batches: Any, count: int | None, trains: Callable[[], object]) -> list[Any]:
    """So many batches, with a step after each."""
    got: list[Any] = []
    for batch in batches:
        got.append(batch)
        trains()
        if len(got) == count:
            break
    return got


def _resumed(make: Callable[[], Any], trains: Callable[[], object], batches: int, ahead: int = 0) -> tuple[Any, Any]:
    """What a run had, in an epoch and in what was left of it after so many batches; what it has after a resume."""
    seed(5)
    loader = make()
    iterator = iter(loader)
    first = _trained(iterator, batches, trains)
    state = through_json(loader.state_dict(ahead=ahead))
    kept = len(first) - ahead
    reference = [*first, *_trained(iterator, None, trains)]
    seed(99)
    resumed = make()
    resumed.load_state_dict(state)
    return (reference, reference[kept:]), _trained(resumed, None, trains)


def _once(batches: list[Any]) -> bool:
    return sorted(number for batch in batches for number in batch) == _ALL


@pytest.mark.parametrize("draw", _DRAWS)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("collate", [list, _mixed, _drawing_once], ids=["plain", "mixed", "differs"])
def test_a_collate_fn_that_draws(collate: Any, workers: int, draw: str) -> None:
    """Whatever it drew between the samples, it draws again."""

    def make() -> Any:
        return DataLoader(Buffered(_DRAWS[draw]), 4, num_workers=workers, collate_fn=collate)

    for batches in (1, 3, 5):
        (_, rest), again = _resumed(make, lambda: None, batches)
        assert again == rest


@pytest.mark.parametrize("draw", _DRAWS)
def test_training_that_draws_is_told_of(draw: str) -> None:
    """Between the batches, from where the stream draws: it would yield other samples when it is read again."""

    def make() -> Any:
        return DataLoader(Buffered(_DRAWS[draw]), 4, collate_fn=list)

    (_, rest), again = _resumed(make, lambda: _DRAWS[draw](7), 1)
    assert again == rest, "before the second batch nobody has drawn in between"
    for batches in (2, 4):
        with pytest.raises(ValueError, match=r"draws from (torch|Python)'s global generator"):
            _resumed(make, lambda: _DRAWS[draw](7), batches)


@pytest.mark.parametrize("draw", _DRAWS)
def test_what_the_user_seeds_before_the_epoch_goes_on(draw: str) -> None:
    """That stays as it is, and the stream is read again as it was all the same."""

    def make() -> Any:
        return DataLoader(Buffered(_DRAWS[draw]), 4, collate_fn=list)

    seed(5)
    loader = make()
    first = _trained(iter(loader), 3, lambda: None)
    resumed = make()
    resumed.load_state_dict(through_json(loader.state_dict()))
    seed(77)
    assert _once([*first, *resumed])


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_the_second_of_a_pair_of_normals_is_drawn_again(taken: int) -> None:
    """torch keeps it beside its generator's numbers, which do not move as it is drawn."""
    data: Any = Made(8, lambda _: torch.randn(()))
    torch.manual_seed(3)
    loader = DataLoader(data, batch_size=None)
    iterator = iter(loader)
    for _ in range(taken):
        last = next(iterator)
    state = through_json(loader.state_dict(ahead=1))
    whole = [last, *iterator]
    torch.manual_seed(4)
    resumed = DataLoader(data, batch_size=None)
    resumed.load_state_dict(state)
    assert [each.item() for each in resumed] == [each.item() for each in whole]
