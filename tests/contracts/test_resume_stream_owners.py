"""Wherever an iterable data set written for torchdata's ``StatefulDataLoader`` keeps its state, each sample comes once.

torchdata's rule: a data set's state is loaded before ``iter()``, and what ``iter()`` returned gets its own after that,
also where that is the data set itself. Nothing is asked for a state before the first ``iter()``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from minato_gpu import DataLoader
from minato_gpu.lanes import streams
from tests.contracts.resuming import values
from tests.contracts.test_resume_stream_epochs import WAYS, Counts, epochs_go_on


class Own(IterableDataset[Any]):
    """Its own iterator, which begins anew with ``iter()``; yields (worker, epoch, n)."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.epoch, self.at = -1, 0

    @property
    def worker(self) -> int:
        info = get_worker_info()
        return 0 if info is None else info.id

    def __iter__(self) -> Any:
        self.epoch, self.at = self.epoch + 1, 0
        return self

    def __next__(self) -> Any:
        if self.at == self.sizes[self.worker]:
            raise StopIteration
        self.at += 1
        return torch.tensor([self.worker, self.epoch, self.at - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


class OwnGoesOn(Own):
    """It begins anew only where it has come to its end."""

    def __iter__(self) -> Any:
        return super().__iter__() if self.epoch < 0 or self.at == self.sizes[self.worker] else self


class OwnLate(Own):
    """What its state goes into is made by ``iter()``."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.begun = -1

    def __iter__(self) -> Any:
        self.begun += 1
        self.place = _Place(self.begun)
        return self

    def __next__(self) -> Any:
        if self.place.at == self.sizes[self.worker]:
            raise StopIteration
        self.place.at += 1
        return torch.tensor([self.worker, self.place.epoch, self.place.at - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"begun": self.begun, **self.place.__dict__}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begun = state["begun"]
        self.place.epoch, self.place.at = state["epoch"], state["at"]


class _Place:
    def __init__(self, epoch: int, at: int = 0) -> None:
        self.epoch, self.at = epoch, at


class Copies(Own):
    """Its iterator is a copy of it, so both have states."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes)
        self.epoch = 0

    def __iter__(self) -> Any:
        found = copy.copy(self)
        found.at = 0
        return found


class Late(Counts):
    """What its state is made of comes with ``iter()``, which takes up one that was loaded."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.loaded: Any = (0, 0)
        self.place: _Place

    def __iter__(self) -> Iterator[Any]:
        loaded, self.loaded = self.loaded, None
        self.place = _Place(self.place.epoch + 1) if loaded is None else _Place(*loaded)
        return self._samples(self.place)

    def _samples(self, place: Any) -> Iterator[Any]:
        while place.at < self.sizes[self.worker]:
            place.at += 1
            yield torch.tensor([self.worker, place.epoch, place.at - 1])

    def state_dict(self) -> dict[str, Any]:
        return dict(self.place.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["epoch"], state["at"]


class OfIterator(IterableDataset[Any]):
    """Only the iterator has a state."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Any:
        return iter(Own(self.sizes))


_FEW = ("inline", "short-lived thread", "processes", "short-lived")


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("kind", "way"),
    [*((Own, way) for way in WAYS), *((kind, way) for kind in (OwnLate, Copies, Late, OfIterator) for way in _FEW)],
)
def test_every_sample_comes_once(kind: Any, way: str) -> None:
    """In this epoch and those after it: saved at any step, and at once again."""
    epochs_go_on(kind, way)


@pytest.mark.parametrize("way", ["inline", "processes"])
def test_one_that_goes_on_where_it_is(way: str) -> None:
    epochs_go_on(OwnGoesOn, way)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_large_state_of_some_batches_ago(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came since is read again, without another ``iter()``."""
    monkeypatch.setattr(streams, "LARGE", 0)

    def make() -> Any:
        return DataLoader(Own([90, 90]), 2, num_workers=workers)

    want = values(make())
    for batches in (1, 7, 20, 43):
        loader = make()
        iterator = iter(loader)
        first = values(next(iterator) for _ in range(batches))
        state = loader.state_dict()
        resumed = make()
        resumed.load_state_dict(state)
        assert first + values(resumed) == want
    assert any(own.get("since") for own in state["source"]["streams"])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resume_iterates_the_data_set_once(workers: int) -> None:
    class Counted(OfIterator):
        made = 0

        def __iter__(self) -> Any:
            self.made += 1
            return map(self._marked, super().__iter__())

        def _marked(self, sample: Any) -> int:
            return self.made

    loader = DataLoader(Counted([9]), num_workers=workers)
    assert [int(next(iter(loader))) for _ in range(2)] == ([1, 2] if workers == 0 else [1, 1])
    resumed = DataLoader(Counted([9]), num_workers=workers)
    resumed.load_state_dict(loader.state_dict())
    assert set(map(int, resumed)) == {1}


def test_a_state_of_another_kind_is_refused() -> None:
    loader = DataLoader(Own([4]), 2)
    next(iter(loader))
    with pytest.raises(ValueError, match="of a data set that is its own iterator, and Counts is none"):
        DataLoader(Counts([4]), 2).load_state_dict(loader.state_dict())
