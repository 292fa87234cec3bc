"""Iterable data sets that know which epoch it is: what comes after a resume is what would have come without one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from minato_gpu import DataLoader, merge_state_dicts
from tests.contracts.datasets import Streams
from tests.contracts.resuming import saves_along, through_json, values
from tests.contracts.test_resume_streams import Stateful, StatefulIterator

_EPOCHS = 3


class Counts(IterableDataset[Any]):
    """Yields (worker, epoch, n); its state at the end of an epoch is that of the next one's beginning."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.epoch = self.at = 0

    @property
    def worker(self) -> int:
        info = get_worker_info()
        return 0 if info is None else info.id

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.sizes[self.worker]:
            self.at += 1
            yield torch.tensor([self.worker, self.epoch, self.at - 1])
        self.at = 0
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


class CountsAtIter(Counts):
    """Begins where it was told to, once: its state at an epoch's end says that all has been yielded."""

    begin_at = 0

    def __iter__(self) -> Iterator[Any]:
        self.at, self.begin_at = self.begin_at, 0
        while self.at < self.sizes[self.worker]:
            self.at += 1
            yield torch.tensor([self.worker, 0, self.at - 1])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin_at = self.at = state["at"]


class Keeps(CountsAtIter):
    """Begins there in every epoch, till it is told otherwise, as Hugging Face's data sets do without ``set_epoch``."""

    def __iter__(self) -> Iterator[Any]:
        begin_at = self.begin_at
        yield from super().__iter__()
        self.begin_at = begin_at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": 0}


class CountsLate(Counts):
    """Counts as an epoch begins, and takes up a state only then: it tells an old one until its first sample."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes)
        self.epoch = -1
        self.loaded: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        loaded, self.loaded = self.loaded, None
        self.epoch, self.at = (self.epoch + 1, 0) if loaded is None else (loaded["epoch"], loaded["at"])
        while self.at < self.sizes[self.worker]:
            self.at += 1
            yield torch.tensor([self.worker, self.epoch, self.at - 1])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state if state["epoch"] >= 0 else None


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


WAYS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "inline": ({}, [5]),
    "inline whole": ({}, [6]),
    "inline drop": ({"drop_last": True}, [5]),
    "thread": ({"num_workers": 1, "persistent_workers": True, "worker_kind": "thread"}, [5]),
    "short-lived thread": ({"num_workers": 1, "worker_kind": "thread"}, [5]),
    "three processes": ({"num_workers": 3, "persistent_workers": True}, [6, 0, 3]),
    "processes that stay": ({"num_workers": 2, "epochs": _EPOCHS}, [2, 5]),
    "processes": ({"num_workers": 2, "persistent_workers": True}, [1, 6]),
    "short-lived": ({"num_workers": 2}, [3, 4]),
}


def _make(kind: Any, way: str) -> Any:
    arguments, sizes = WAYS[way]
    return DataLoader(kind(sizes), 2, **arguments)


def _saved(loader: Any, ahead: int = 0) -> Any:
    return through_json(loader.state_dict(ahead=ahead))


_OTHER_PROCESSES = ("three processes", "processes that stay", "short-lived")


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        (kind, way)
        for kind in (Counts, CountsAtIter, CountsLate, Both)
        for way in WAYS
        if kind is Both or way not in _OTHER_PROCESSES
    ],
)
def test_the_epochs_go_on(kind: Any, way: str) -> None:
    """See ``epochs_go_on``."""
    epochs_go_on(kind, way)
    if kind is not CountsAtIter and way != "short-lived":
        uninterrupted = _make(kind, way)
        want = [values(uninterrupted) for _ in range(_EPOCHS)]
        assert {row[1] for batch in want[2] for row in batch} == {2}


def epochs_go_on(kind: Any, way: str) -> None:
    """Saved in the first or second epoch, at any step (by processes, but for those of one way, at every third); between
    them; and again right after ``iter()``."""
    uninterrupted = _make(kind, way)
    want = [values(uninterrupted) for _ in range(_EPOCHS)]
    assert all(len(epoch) > 1 for epoch in want)
    loader = _make(kind, way)
    at_the_end = saves_along(loader)[-1]
    stride = 3 if way in _OTHER_PROCESSES else 1
    saves = [(0, *at_the_end), (1, [], _saved(loader)), *((1, *save) for save in saves_along(loader, stride))]
    for number, (epoch, first, saved) in enumerate(saves):
        got, states = values(first), [saved]
        if number < 2 or number % 2 == 0:
            again = _make(kind, way)
            again.load_state_dict(saved)
            iterator = iter(again)
            states.append(_saved(again))
            del iterator
        for state in states:
            resumed = _make(kind, way)
            resumed.load_state_dict(state)
            rest = [values(resumed) for _ in range(epoch, _EPOCHS)]
            assert [got + rest[0], *rest[1:]] == want[epoch:], number


@pytest.mark.parametrize("way", ["inline", "inline whole", "thread", "short-lived thread", "processes"])
@pytest.mark.parametrize("kind", [Counts, CountsAtIter, CountsLate])
def test_saved_once_more_after_an_epoch_of_which_nothing_was_left(kind: Any, way: str) -> None:
    uninterrupted = _make(kind, way)
    want = [values(uninterrupted) for _ in range(3)]
    first, state = saves_along(_make(kind, way))[-1]
    resumed = _make(kind, way)
    resumed.load_state_dict(state)
    assert values(first) + values(resumed) == want[0]
    again = _make(kind, way)
    again.load_state_dict(_saved(resumed))
    assert [values(again) for _ in range(2)] == want[1:]


@pytest.mark.parametrize("way", ["inline", "inline whole", "thread", "short-lived thread", "processes"])
@pytest.mark.parametrize("kind", [Counts, CountsAtIter, Keeps])
def test_an_epoch_after_a_save_between_two_is_whole(kind: Any, way: str) -> None:
    """Whatever the data set says when it has ended; and so is one after a state at its start."""
    loader = _make(kind, way)
    list(loader)
    state = _saved(loader)
    iterator = iter(loader)
    for each in (state, _saved(loader)):
        resumed = _make(kind, way)
        resumed.load_state_dict(each)
        second = values(resumed)
        assert second == values(iterator) or each is not state
        assert len(second) == len(values(resumed)) > 0


@pytest.mark.parametrize("way", ["inline", "thread", "short-lived thread", "processes"])
def test_a_consumer_that_reads_ahead_over_the_start(way: str) -> None:
    loader = _make(Counts, way)
    list(loader)
    iterator = iter(loader)
    got = values(next(iterator) for _ in range(2))
    resumed = _make(Counts, way)
    resumed.load_state_dict(_saved(loader, ahead=2))
    assert values(resumed)[:2] == got
    assert {row[1] for batch in values(resumed) for row in batch} == {2}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=1), st.integers(1, 3), st.booleans(), st.data())
def test_any_size(sizes: list[int], batch: int, drop_last: bool, data: st.DataObject) -> None:
    def make() -> Any:
        return DataLoader(Counts(sizes), batch, drop_last=drop_last)

    reference = make()
    want = [values(reference) for _ in range(_EPOCHS)]
    loader, got = make(), list[Any]()
    while len(got) < _EPOCHS:
        iterator, epoch = iter(loader), list[Any]()
        while True:
            if data.draw(st.integers(0, 3)) == 0:
                state = _saved(loader)
                loader = make()
                loader.load_state_dict(state)
                iterator = iter(loader)
            try:
                epoch.append(next(iterator).tolist())
            except StopIteration:
                break
        got.append(epoch)
        if data.draw(st.booleans()):
            state = _saved(loader)
            loader = make()
            loader.load_state_dict(state)
    assert got == want


class Alternates(Counts):
    """Every other epoch has fewer samples than a batch."""

    def __iter__(self) -> Iterator[Any]:
        self.sizes = [(6, 3)[self.epoch % 2]]
        return super().__iter__()


@pytest.mark.parametrize("more", [{}, {"num_workers": 1, "worker_kind": "thread"}], ids=["inline", "thread"])
def test_an_epoch_of_less_than_a_batch_is_not_skipped(more: dict[str, Any]) -> None:
    def make() -> Any:
        return DataLoader(Alternates([]), 4, drop_last=True, **more)

    uninterrupted = make()
    want = [values(uninterrupted) for _ in range(3)]
    assert [len(epoch) for epoch in want] == [1, 0, 1]
    loader = make()
    list(loader)
    resumed = make()
    resumed.load_state_dict(_saved(loader))
    assert [values(resumed) for _ in range(2)] == want[1:]


def test_what_has_no_state_between_epochs() -> None:
    for kind in (Streams, StatefulIterator):
        loader = DataLoader(kind([4]), 2)
        list(loader)
        assert "streams" not in loader.state_dict()["source"]
    loader = DataLoader(Counts([4]), 2, num_workers=1)
    list(loader)
    assert "streams" not in loader.state_dict()["source"], "the next epoch's workers have the data set as it is here"


def test_what_is_refused() -> None:
    loader = DataLoader(Counts([4]), 2)
    list(loader)
    state = _saved(loader)
    with pytest.raises(ValueError, match="streams of 1 workers, this loader has 2"):
        DataLoader(Counts([4, 4]), 2, num_workers=2).load_state_dict(state)
    with pytest.raises(ValueError, match="holds one of the data set, but Streams takes none"):
        DataLoader(Streams([4]), 2).load_state_dict(state)
    with pytest.raises(ValueError, match="every rank resumes from its own state"):
        merge_state_dicts([state, state])
    for field, value in (("batches", 1), ("ended", 0), ("over", 3), ("state", {"of": "worker"}), ("state", 3)):
        damaged = copy.deepcopy(state)
        damaged["source"]["streams"][0][field] = value
        with pytest.raises(ValueError, match="state: '"):
            DataLoader(Counts([4]), 2).load_state_dict(damaged)
    streams: Any
    for streams in (3, [3], {}):
        with pytest.raises(ValueError, match="state"):
            DataLoader(Counts([4]), 2).load_state_dict({**state, "source": {**state["source"], "streams": streams}})
    assert merge_state_dicts([state]) == state


class _Untold(Stateful):
    def state_dict(self) -> Any:
        raise RuntimeError("not now")


@pytest.mark.parametrize("way", ["inline", "thread"])
def test_a_data_set_that_cannot_tell_it(way: str) -> None:
    loader = _make(_Untold, way)
    list(loader)
    with pytest.raises(ValueError, match=r"worker 0 cannot be saved: _Untold.state_dict\(\): RuntimeError: not now"):
        loader.state_dict()
