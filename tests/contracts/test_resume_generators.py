"""Where generators stand after a resume, whose they are, and streams that draw from them."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
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


def trained(loader: Any, first: int = 0) -> Iterator[tuple[list[Any], Any]]:
    """What training gets with each batch, which are the epoch, the batch, and what it draws for it, and the loader's
    state then; also, with nothing, before an epoch's first batch and when its iterator has said that it has ended."""
    for epoch in range(first, EPOCHS):
        iterator = iter(loader)
        yield [], loader.state_dict()
        for batch in iterator:
            got = [epoch, [list(map(float, row)) for row in batch], torch.rand(()).item()]
            yield [got], loader.state_dict()
        yield [], loader.state_dict()


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
    "threads": {"num_workers": 2, "worker_kind": "thread"},
}


@pytest.mark.parametrize("way", _WAYS)
def test_later_epochs(way: str) -> None:
    """Before an epoch's first batch, within it and at its end: what follows is what the uninterrupted run had."""
    seed(5)
    points = [(got, through_json(state)) for got, state in trained(make(**_WAYS[way]))]
    for number in range(len(points)) if way in ("inline", "threads") else range(1, len(points), 6):  # forks take long
        seed(99)
        state, resumed = points[number][1], make(**_WAYS[way])
        resumed.load_state_dict(state)
        expected = [each for got, _ in points[number + 1 :] for each in got]
        assert [each for got, _ in trained(resumed, state["epoch"]) for each in got] == expected, number


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


def _mixing(samples: Any) -> Any:
    """Draws for some batches, as mixup may."""
    if samples != _ALL[:4] and sum(samples) % 2:
        torch.rand(())
        random.random()
    return samples


_DRAWS_ITSELF = r"draws from \w+'s global generator, so that others would"
_COLLATE_DRAWS = r"its collate_fn draws from a global generator, as the stream may. Give the"


@pytest.mark.parametrize(
    ("workers", "draw", "collate", "message"),
    [
        (0, "python", list, _DRAWS_ITSELF),
        (0, "torch", list, _DRAWS_ITSELF),
        (0, "torch", _mixing, _COLLATE_DRAWS),
        (1, "torch", _mixing, _COLLATE_DRAWS),
    ],
)
def test_a_stream_that_would_draw_other_samples_is_refused(workers: int, draw: str, collate: Any, message: str) -> None:
    """When it is read again. (Workers are seeded as before: what their streams draw alone is in the table.)"""

    def make() -> Any:
        return DataLoader(Buffered(_DRAWS[draw]), 4, num_workers=workers, collate_fn=collate)

    seed(5)
    loader, resumed = make(), make()
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    resumed.load_state_dict(through_json(loader.state_dict()))
    with pytest.raises(ValueError, match=message):
        list(resumed)


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
