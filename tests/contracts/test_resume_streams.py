"""Save and resume of iterable data sets: wherever they keep their state, in whichever epoch, however large it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from minato_gpu import DataLoader
from tests.contracts.datasets import Counts
from tests.contracts.modes import IN_ORDER, IN_ORDER_THREADS, Mode
from tests.contracts.resuming import saves_along, through_json
from tests.torch_semantics.datasets import as_lists

_EPOCHS = 3


class Both(Counts):
    """The data set knows the epoch, and its iterator how far that has come."""

    def __iter__(self) -> Any:
        return _BothIterator(self)


class _BothIterator:
    def __init__(self, dataset: Both) -> None:
        self.dataset, self.at = dataset, 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if self.at == self.dataset.sizes[self.dataset.worker]:
            self.dataset.epoch += 1
            raise StopIteration
        self.at += 1
        return torch.tensor([self.dataset.worker, self.dataset.epoch, self.at - 1])

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Own(Counts):
    """Its own iterator, which begins anew with ``iter()``."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes)
        self.epoch = -1

    def __iter__(self) -> Any:
        self.epoch, self.at = self.epoch + 1, 0
        return self

    def __next__(self) -> Any:
        if self.at == self.sizes[self.worker]:
            raise StopIteration
        self.at += 1
        return torch.tensor([self.worker, self.epoch, self.at - 1])


WAYS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "inline": ({}, [5]),
    "inline drop": ({"drop_last": True}, [5]),
    "thread": ({"num_workers": 1, "persistent_workers": True, "worker_kind": "thread"}, [5]),
    "three processes": ({"num_workers": 3, "persistent_workers": True}, [6, 0, 3]),
    "processes that stay": ({"num_workers": 2, "epochs": _EPOCHS}, [2, 5]),
    "processes": ({"num_workers": 2, "persistent_workers": True}, [1, 6]),
    "short-lived": ({"num_workers": 2}, [3, 4]),
}


def _make(kind: Any, way: str) -> Any:
    arguments, sizes = WAYS[way]
    return DataLoader(kind(sizes), 2, **arguments)


def _saved(loader: Any) -> Any:
    return through_json(loader.state_dict())


@pytest.mark.parametrize("kind", [Both, Own])
@pytest.mark.parametrize("way", WAYS)
def test_the_epochs_go_on(kind: Any, way: str) -> None:
    """Saved in the first or second epoch, at any step (by processes, but for those of one way, at every third); between
    them; and again right after ``iter()``."""
    uninterrupted = _make(kind, way)
    want = [as_lists(uninterrupted) for _ in range(_EPOCHS)]
    assert all(len(epoch) > 1 for epoch in want)
    loader = _make(kind, way)
    at_the_end = saves_along(loader)[-1]
    stride = 3 if way in ("three processes", "processes that stay", "short-lived") else 1
    saves = [(0, *at_the_end), (1, [], _saved(loader)), *((1, *save) for save in saves_along(loader, stride))]
    for number, (epoch, first, saved) in enumerate(saves):
        got, states = as_lists(first), [saved]
        if number < 2 or number % 2 == 0:
            again = _make(kind, way)
            again.load_state_dict(saved)
            iterator = iter(again)
            states.append(_saved(again))
            del iterator
        for state in states:
            resumed = _make(kind, way)
            resumed.load_state_dict(state)
            rest = [as_lists(resumed) for _ in range(epoch, _EPOCHS)]
            assert [got + rest[0], *rest[1:]] == want[epoch:], number


class Asked(Counts):
    """A batch also tells how often its state was asked for."""

    asked = 0

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            yield torch.cat([sample, torch.tensor([self.asked])])

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return super().state_dict()


@pytest.mark.parametrize(("mode", "workers"), [(IN_ORDER, 0), (IN_ORDER, 2), (IN_ORDER_THREADS, 1)])
def test_snapshot_every_n_steps(mode: Mode, workers: int) -> None:
    """A stream is asked for its state as often as that says, and every batch can be resumed from."""

    def make() -> Any:
        return mode.loader(Asked([41, 41]), 2, num_workers=workers, snapshot_every_n_steps=5)

    saves = saves_along(make())
    whole, _ = saves[-1]
    assert int(whole[-1][-1, -1]) <= 2 + 20 // 5
    for got, state in saves[1:-1:3]:
        resumed = make()
        resumed.load_state_dict(state)
        assert [batch[:, :3].tolist() for batch in [*got, *resumed]] == [batch[:, :3].tolist() for batch in whole]
