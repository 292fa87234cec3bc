"""Save and resume of iterable data sets: each worker's stream goes on where its delivered batches end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from minato_gpu import DataLoader
from tests.contracts.datasets import Made, Streams
from tests.contracts.modes import BY_PROCESSES, IN_ORDER_THREADS, Mode


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
@pytest.mark.parametrize("mode", [*BY_PROCESSES, IN_ORDER_THREADS], ids=lambda mode: mode.name)
def test_every_step(mode: Mode, kind: str, batch_size: int | None) -> None:
    workers, sizes = (3, [7, 2, 4]) if mode.processes else (1, [9])

    def make() -> Any:
        return mode.loader(_KINDS[kind](sizes), batch_size, num_workers=workers)

    reference = _content(make())
    for step in range(0, len(reference) + 1, 1 if batch_size else 3):
        loader = make()
        iterator = iter(loader)
        first = [next(iterator) for _ in range(step)]
        state = json.loads(json.dumps(loader.state_dict()))
        resumed = make()
        resumed.load_state_dict(state)
        epoch = _content([*first, *resumed])
        if mode.lateness:
            assert sorted(epoch) == sorted(reference)
            for worker, size in enumerate(sizes):
                assert [n for batch in epoch for owner, n in batch if owner == worker] == list(range(size))
        else:
            assert epoch == reference
        assert sorted(_content(resumed)) == sorted(reference), "the epoch after that is whole"


@pytest.mark.parametrize("kind", _KINDS)
def test_without_workers(kind: str) -> None:
    def make() -> Any:
        return DataLoader(_KINDS[kind]([9]), 2)

    reference = _content(make())
    for step in range(6):
        loader = make()
        iterator = iter(loader)
        first = [next(iterator) for _ in range(step)]
        state = json.loads(json.dumps(loader.state_dict()))
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
