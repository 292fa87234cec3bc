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
from torch.utils.data import IterableDataset, get_worker_info

from minato_gpu import DataLoader
from minato_gpu.sampling.packing import packed_state
from tests.contracts.datasets import Made, draw
from tests.contracts.resuming import generator, loader_of, through_json

EPOCHS, SAMPLES, SIZE = 4, 20, 4


def _states() -> list[Any]:
    """How torch's, Python's and NumPy's global generators stand."""
    return [packed_state(torch.get_rng_state()), random.getstate(), repr(np.random.get_state())]


def seed(number: int) -> None:
    """Of all global generators."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def make(**more: Any) -> Any:
    """A loader that is given no generator. Its data set draws: without workers from torch's, with threads from none."""
    sample: Any = draw if more.get("num_workers") else lambda index: [index, torch.rand(())]
    if more.get("worker_kind") == "thread":
        sample = lambda index: [index]  # noqa: E731
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


def test_the_users_own_wins(caplog: pytest.LogCaptureFixture) -> None:
    """torch's global generator goes back to where it was, but stays where it has moved since load_state_dict: that is
    said once. Python's and NumPy's are in no state."""
    seed(1)
    loader = loader_of(shuffle=True)
    next(iter(loader))
    state = through_json(loader.state_dict())
    for moved in (False, True):
        seed(2)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="minato_gpu"):
            for number in (7, 8):
                resumed = loader_of(shuffle=True)
                resumed.load_state_dict(state)
                if moved:
                    torch.manual_seed(number)
                there = _states()
                iter(resumed)
                assert _states() == (there if moved else [state["global"], *there[1:]])
        assert len(caplog.records) == moved
        assert all("stays as it is" in record.message for record in caplog.records)


@pytest.mark.parametrize("workers", [0, 1])
def test_nobody_elses_moves(workers: int) -> None:
    """Saving moves none, nor does a loader that is given no state; load_state_dict alone moves none, either."""
    seed(1)
    loader = loader_of(range(40), num_workers=workers, generator=generator())
    before = _states()
    loader.load_state_dict({})
    states = [loader.state_dict()]
    for _ in loader:
        states += [loader.state_dict(), loader.state_dict(ahead=1)]
    states.append(loader.state_dict())
    for state in states:
        loader_of(range(40), num_workers=workers, generator=generator()).load_state_dict(state)
    assert _states() == before


_WAYS: dict[str, dict[str, Any]] = {
    "inline": {},
    "processes": {"num_workers": 2},
    "processes that stay": {"num_workers": 2, "persistent_workers": True},
    "declared epochs": {"num_workers": 1, "epochs": EPOCHS},
    "bounded": {"num_workers": 2, "in_order": False},
    "threads": {"num_workers": 2, "worker_kind": "thread"},
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


def _resumed(make: Callable[[], Any], batches: int) -> tuple[Any, Any]:
    """What a run had after so many batches of an epoch, and what it has after a resume."""
    seed(5)
    loader = make()
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    state = through_json(loader.state_dict())
    rest = list(iterator)
    seed(99)
    resumed = make()
    resumed.load_state_dict(state)
    return rest, list(resumed)


def _mixing(samples: Any) -> Any:
    """Draws for some batches, as mixup may."""
    if samples != _ALL[:4] and sum(samples) % 2:
        torch.rand(())
        random.random()
    return samples


@pytest.mark.parametrize("draw", _DRAWS)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_draws(workers: int, draw: str) -> None:
    """Without workers it would yield other samples when it is read again."""

    def make() -> Any:
        return DataLoader(Buffered(_DRAWS[draw]), 4, num_workers=workers, collate_fn=list)

    for batches in (1, 3, 5):
        if not workers:
            with pytest.raises(ValueError, match=r"draws from \w+'s global generator, so that others would"):
                _resumed(make, batches)
        else:
            rest, again = _resumed(make, batches)
            assert again == rest


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_beside_a_collate_fn_that_draws(workers: int) -> None:
    """It is read again without that, so it is refused."""

    def make() -> Any:
        return DataLoader(Buffered(_DRAWS["torch"]), 4, num_workers=workers, collate_fn=_mixing)

    with pytest.raises(ValueError, match=r"its collate_fn draws from a global generator, as the stream may. Give the"):
        _resumed(make, 5)


class Draws(IterableDataset[Any]):
    """Yields what its worker draws, its seed, and what torch says the seed is."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        drawn = random.getrandbits(48), int(torch.randint(1 << 48, ()))
        yield torch.tensor([*drawn, info.seed >> 1, torch.initial_seed() >> 1])


def test_workers_that_start_after_a_resume_draw_something_new() -> None:
    """Of workers that stay: they are started at a later epoch."""
    loader, resumed = (DataLoader(Draws(), None, num_workers=1, persistent_workers=True) for _ in range(2))
    (first,), (second,) = list(loader), list(loader)
    resumed.load_state_dict(loader.state_dict())
    (third,) = list(resumed)
    drawn = {number for batch in (first, second, third) for number in batch[:2].tolist()}
    assert len(drawn) == 6
    assert first[2:].tolist() == third[2:].tolist(), "what a worker is told of its seed stays"
