"""Save and resume of iterable data sets: each worker's stream goes on where its delivered batches end."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from minato_gpu import DataLoader
from minato_gpu.checkpoint import streams
from tests.contracts.datasets import Made, Streams
from tests.contracts.modes import BOUNDED_8, IN_ORDER, IN_ORDER_THREADS, Mode
from tests.contracts.resuming import saves_along, through_json
from tests.support.leaks import threads_since
from tests.support.waiting import wait_until

_FORK = multiprocessing.get_context("fork")


class Stateful(IterableDataset[Any]):
    """A stream with a state of its own, which counts how often a sample was made."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.at = 0
        self.made = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        while self.at < self.sizes[worker]:
            self.at += 1
            self.made += 1
            yield torch.tensor([worker, self.at - 1, self.made])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class StatefulIterator(IterableDataset[Any]):
    """The iterator has the state."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Any:
        info = get_worker_info()
        return _Iterator(0 if info is None else info.id, self.sizes)


class _Iterator:
    def __init__(self, worker: int, sizes: list[int]) -> None:
        self.worker, self.size, self.at = worker, sizes[worker], 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if self.at == self.size:
            raise StopIteration
        self.at += 1
        return torch.tensor([self.worker, self.at - 1, self.at])

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def _content(batches: Any) -> list[Any]:
    return [batch.reshape(-1, batch.shape[-1])[:, :2].tolist() for batch in batches]


_KINDS: dict[str, Any] = {"read again": Streams, "data set's state": Stateful, "iterator's state": StatefulIterator}


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("mode", [IN_ORDER, BOUNDED_8, IN_ORDER_THREADS], ids=lambda mode: mode.name)
def test_every_step(mode: Mode, kind: str, batch_size: int | None) -> None:
    workers, sizes = (3, [5, 1, 3]) if mode.processes else (1, [9])

    def make() -> Any:
        return mode.loader(_KINDS[kind](sizes), batch_size, num_workers=workers)

    reference = _content(make())
    stride = (2 if mode.lateness else 1) if batch_size else 3
    for first, state in saves_along(make(), stride):
        resumed = make()
        resumed.load_state_dict(state)
        epoch = _content([*first, *resumed])
        if mode.lateness:
            assert sorted(epoch) == sorted(reference)
            for worker, size in enumerate(sizes):
                assert [n for batch in epoch for owner, n in batch if owner == worker] == list(range(size))
        else:
            assert epoch == reference
        if len(first) % 3 == 0:
            assert sorted(_content(resumed)) == sorted(reference), "the epoch after that is whole"


@pytest.mark.parametrize("kind", _KINDS)
def test_without_workers(kind: str) -> None:
    def make() -> Any:
        return DataLoader(_KINDS[kind]([9]), 2)

    reference = _content(make())
    for first, state in saves_along(make()):
        resumed = make()
        resumed.load_state_dict(state)
        assert _content([*first, *resumed]) == reference


def test_a_stream_with_a_state_is_not_read_again() -> None:
    def make() -> Any:
        return DataLoader(Stateful([20, 20]), 2, num_workers=2)

    loader = make()
    iterator = iter(loader)
    first = [next(iterator) for _ in range(9)]
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    rest = list(resumed)
    assert sum(len(batch) for batch in (*first, *rest)) == 40
    assert max(int(batch[:, 2].max()) for batch in rest) == 12, "what its worker made since the resume"


@pytest.mark.parametrize("kind", _KINDS)
def test_a_consumer_that_reads_ahead(kind: str) -> None:
    def make() -> Any:
        return DataLoader(_KINDS[kind]([7, 2, 4]), 2, num_workers=3)

    reference = _content(make())
    loader = make()
    iterator = iter(loader)
    received = [next(iterator) for _ in range(5)]
    for ahead in range(6):
        resumed = make()
        resumed.load_state_dict(loader.state_dict(ahead=ahead))
        assert _content([*received[: 5 - ahead], *resumed]) == reference


def test_another_number_of_workers() -> None:
    loader = DataLoader(Streams([7, 7]), 2, num_workers=2)
    next(iter(loader))
    other = DataLoader(Streams([7, 7, 7]), 2, num_workers=3)
    with pytest.raises(ValueError, match="streams of 2 workers, this loader has 3"):
        other.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="saved with batch_size 2, this loader has 3"):
        DataLoader(Streams([7, 7]), 3, num_workers=2).load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="of a data set of kind 'iterable'"):
        DataLoader(Made(3, torch.tensor), 2).load_state_dict(loader.state_dict())


class _Untold(Stateful):
    """Its state cannot be had, which is nobody's business but of who saves."""

    def state_dict(self) -> Any:
        raise RuntimeError("not now")


class _Unpicklable(Stateful):
    def state_dict(self) -> Any:
        return {"at": lambda: self.at}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("kind", "message"), [(_Untold, "not now"), (_Unpicklable, "pickle")])
def test_a_stream_that_cannot_tell_its_state(kind: type[Stateful], message: str, workers: int) -> None:
    loader: Any = DataLoader(kind([8]), 2, num_workers=workers)
    iterator = iter(loader)
    got = [next(iterator)]
    with pytest.raises(ValueError, match=rf"cannot be saved: {kind.__name__}.state_dict\(\): .*{message}"):
        loader.state_dict()
    got += iterator
    assert [row[1] for batch in got for row in batch.tolist()] == list(range(8))


# --- read again, and how far -------------------------------------------------------------------------------------


class Endless(IterableDataset[Any]):
    """Never ends, has no state, and counts what is read of it."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.read += 1
            yield self.read


def _far(batches: int, **arguments: Any) -> tuple[Any, Any]:
    """A loader over an endless stream, and a state that says so many batches were delivered."""

    def make() -> Any:
        return DataLoader(Endless(), 4, **arguments)

    loader = make()
    next(iter(loader))
    state = through_json(loader.state_dict())
    state["source"]["streams"][0]["batches"] = batches
    return make(), state


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batches", [1 << 26 | 1, 10**12, (1 << 63) - 1])
def test_an_endless_stream_is_not_read_for_ever(batches: int, workers: int) -> None:
    loader, state = _far(batches, num_workers=workers)
    with pytest.raises(ValueError, match=f"'batches' tells of a stream of which {4 * batches} samples were delivered"):
        loader.load_state_dict(state)
    assert loader.dataset.read == 0


def test_what_could_not_be_read_again_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MOST_READ_AGAIN", 10)
    loader: Any = DataLoader(Endless(), 4)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    assert sum(own["batches"] for own in loader.state_dict()["source"]["streams"]) == 2
    next(iterator)
    with pytest.raises(ValueError, match="of which 12 samples were delivered"):
        loader.state_dict()


def test_reading_again_is_told_of_and_can_be_broken_off(caplog: pytest.LogCaptureFixture) -> None:
    """By who leaves: the worker's thread, which cannot be killed, ends."""
    before = threading.enumerate()
    loader, state = _far(1 << 26, num_workers=1, worker_kind="thread")
    loader.load_state_dict(state)
    iterator = iter(loader)
    again = [record for record in caplog.records if record.module == "streams"]
    assert [record.getMessage().partition(" are ")[0] for record in again] == ["268435456 samples of the data set"]
    assert wait_until(lambda: loader.dataset.read > 1000)
    iterator._engine.close()
    assert loader.dataset.read < 1 << 28 and not threads_since(before, "minato-worker")


def test_a_stream_that_is_read_again_does_not_hang() -> None:
    """Each of its samples has the limit for itself: the watchdog is told since when the worker is at that one."""
    reached, go_on = _FORK.RawValue("i", 0), _FORK.Semaphore(0)

    class Gated(Endless):
        def __iter__(self) -> Iterator[int]:
            for number in super().__iter__():
                if number in (10, 20):
                    reached.value = number
                    assert go_on.acquire(timeout=20)
                yield number

    def make(dataset: Any) -> Any:
        return DataLoader(dataset, 4, num_workers=1, hang_timeout=60.0)

    loader = make(Endless())
    iterator = iter(loader)
    for _ in range(8):
        next(iterator)
    resumed = make(Gated())
    resumed.load_state_dict(loader.state_dict())
    again = iter(resumed)
    begun = []
    for number in (10, 20):
        assert wait_until(lambda number=number: reached.value == number)  # type: ignore[misc]
        [at] = again._engine.pump.lanes["cpu"].at_work()
        begun.append(at.since)
        go_on.release()
    assert begun[0] < begun[1]
    assert next(again).tolist() == [33, 34, 35, 36]
