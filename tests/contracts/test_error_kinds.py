"""What a sample raises arrives, of whatever kind it is, and never ends an epoch without a word."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from minato_gpu import DataLoader
from tests.contracts.broken import numbers
from tests.contracts.datasets import Made

_WORKERS: dict[str, dict[str, Any]] = {
    "main": {"num_workers": 0},
    "processes": {"num_workers": 2},
    "threads": {"num_workers": 2, "worker_kind": "thread"},
}


def _stops(index: int) -> Any:
    """A data set's own ``next`` that finds nothing."""
    return torch.tensor(index) if index != 17 else next(iter(()))


class _ManyStop(Made):
    def __getitems__(self, keys: list[int]) -> list[Any]:
        return [self.make(key) for key in keys]


@pytest.mark.parametrize("kind", [Made, _ManyStop], ids=["one by one", "many"])
@pytest.mark.parametrize("workers", _WORKERS)
def test_stop_iteration_of_a_sample_does_not_end_the_epoch(workers: str, kind: type[Made]) -> None:
    """As in a generator, it is the cause of a RuntimeError, which names the index."""
    iterator = iter(DataLoader(kind(40, _stops), 4, **_WORKERS[workers]))
    before = [next(iterator).tolist() for _ in range(4)]
    with pytest.raises(RuntimeError, match=r"StopIteration.*(index 17|indices \[16, 17, 18, 19\])") as caught:
        next(iterator)
    assert isinstance(caught.value.__cause__, StopIteration)
    after = [batch.tolist() for batch in iterator]
    assert before + after == [list(range(lo, lo + 4)) for lo in range(0, 40, 4) if lo != 16]


@pytest.mark.parametrize("workers", _WORKERS)
def test_stop_iteration_of_a_sample_that_is_left_out(workers: str) -> None:
    loader = DataLoader(Made(40, _stops), 4, on_error="skip", **_WORKERS[workers])
    assert numbers(loader) == [index for index in range(40) if index != 17]
    assert [(bad["index"], bad["error"]) for bad in loader.stats()["failures"]] == [("17", "StopIteration")]


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(40))


def _cannot_begin(worker: int) -> None:
    raise StopIteration("no start")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("data", [range(40), _Stream()], ids=["map-style", "iterable"])
def test_stop_iteration_of_a_collate_function_does_not_end_the_epoch(data: Any, workers: int) -> None:
    def collate(samples: list[int]) -> list[int]:
        return samples if 17 not in samples else next(iter(()))

    iterator = iter(DataLoader(data, 4, num_workers=workers, collate_fn=collate))
    before = [next(iterator) for _ in range(4)]
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(iterator)
    assert [*before, *iterator] == [list(range(lo, lo + 4)) for lo in range(0, 40, 4) if lo != 16]


class _NoStart(_Stream):
    def __iter__(self) -> Any:
        return iter([next(iter(()))])


@pytest.mark.parametrize("data", [_Stream(), _NoStart()], ids=["worker_init_fn", "iter()"])
def test_stop_iteration_of_a_stream_that_cannot_begin_is_no_empty_stream(data: Any) -> None:
    begin = None if isinstance(data, _NoStart) else _cannot_begin
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(DataLoader(data, 4, num_workers=1, worker_init_fn=begin))


class _Several(Exception):
    message = "of the class: its constructor takes none"


class _Fixed(Exception):
    """Says the same, whatever it is given."""

    def __init__(self, *_: Any) -> None:
        super().__init__("fixed")


class _Mute(Exception):
    """Its ``str`` needs more than a text."""

    def __init__(self, answer: Any) -> None:
        super().__init__(answer)
        self.answer = answer

    def __str__(self) -> str:
        return f"status {self.answer.status}"


_KINDS: dict[str, tuple[Callable[[], Exception], type[Exception]]] = {
    "a group": (lambda: ExceptionGroup("several", [ValueError("the reason")]), RuntimeError),
    "a message of the class": (lambda: _Several("the reason"), RuntimeError),
    "a text of its own": (lambda: _Fixed("the reason"), _Fixed),
    "without a text": (lambda: _Mute(torch.zeros(1)), _Mute),
    "of the codec": (lambda: UnicodeDecodeError("utf-8", b"x", 0, 1, "the reason"), RuntimeError),
}


@pytest.mark.parametrize("workers", ["processes", "threads"])
@pytest.mark.parametrize("kind", _KINDS)
def test_exceptions_that_cannot_be_made_of_a_text(kind: str, workers: str) -> None:
    """Their class, or a RuntimeError in its place; name, place and original traceback are there in any case."""
    make, arrives = _KINDS[kind]

    def raises_here(index: int) -> Any:
        if index == 17:
            raise make()
        return torch.tensor(index)

    with pytest.raises(arrives) as caught:
        list(DataLoader(Made(40, raises_here), 4, **_WORKERS[workers]))
    assert type(caught.value) is arrives
    notes = "\n".join(getattr(caught.value, "__notes__", ()))
    text = notes if "Caught" in notes else str(caught.value)
    for part in (f"Caught {type(make()).__name__} in DataLoader worker", "index 17", "in raises_here"):
        assert part in text
    assert "the reason" in text or kind in ("a text of its own", "without a text")


@dataclass(frozen=True)
class _Frozen(Exception):
    """Takes no notes."""

    code: int


def test_errors_without_workers_keep_their_cause_and_may_refuse_notes() -> None:
    def make(index: int) -> Any:
        try:
            return dict[int, int]()[index]
        except KeyError as error:
            raise _Frozen(index) from error

    with pytest.raises(_Frozen) as caught:
        list(DataLoader(Made(4, make), 2, num_workers=0))
    assert caught.value.code == 0 and isinstance(caught.value.__cause__, KeyError)
