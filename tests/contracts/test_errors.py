"""Clear errors: what ``on_error`` and ``max_failures`` do beyond the faults of the table (``cases.py``), exceptions and
samples that cannot travel."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from minato_gpu import DataLoader, TooManyFailures
from tests.contracts.datasets import Made
from tests.contracts.modes import BOUNDED_8, BY_PROCESSES, Mode
from tests.support.raising import error_of

_FORK = multiprocessing.get_context("fork")
BAD = (5, 6, 17, 30)
GOOD = [index for index in range(40) if index not in BAD]


def broken(index: int) -> Any:
    """Those of ``BAD`` are."""
    if index in BAD:
        raise ValueError(f"sample {index} is broken")
    return torch.tensor(index)


def numbers(batches: Any) -> list[int]:
    """What was delivered, in one list."""
    return [int(number) for batch in batches for number in batch]


@pytest.mark.parametrize("workers", [0, 2])
def test_data_sets_that_fetch_fewer_than_they_are_asked_for(workers: int) -> None:
    """What is missing is counted; a batch of which nothing comes is an error where nothing may be left out."""

    class Fewer(Made):
        def __getitems__(self, keys: list[int]) -> list[Any]:
            return [self.make(key) for key in keys if not 8 <= key <= 12]

    loader = DataLoader(Fewer(40, torch.tensor), 4, num_workers=workers, on_error="skip")
    assert numbers(loader) == [index for index in range(40) if not 8 <= index <= 12]
    stats = loader.stats()
    assert (stats["samples_delivered"], stats["samples_failed"]) == (35, 5)
    with pytest.raises((IndexError, ValueError)):
        list(DataLoader(Fewer(12, torch.tensor), 4, num_workers=workers))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("answer", [None, StopIteration])
def test_answers_that_mean_nothing(answer: Any, workers: int) -> None:
    """And what would end the loop without a word."""

    def decide(bad: Any) -> Any:
        if answer is not None:
            raise answer
        return answer

    text = "on_error returned None" if answer is None else "StopIteration"
    with pytest.raises((ValueError, RuntimeError), match=text):
        list(DataLoader(Made(40, broken), 4, num_workers=workers, on_error=decide))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("limit", "fits"),
    [(4, True), (3, False), (0, False), (0.1, True), (np.int64(3), False), (np.float32(0.125), True), (0.05, False)],
)
def test_the_budget(limit: Any, fits: bool, workers: int) -> None:
    loader = DataLoader(Made(40, broken), 4, num_workers=workers, on_error="skip", max_failures=limit)
    if fits:
        assert numbers(loader) == GOOD
    else:
        with pytest.raises(TooManyFailures, match="samples failed in this epoch, max_failures="):
            list(loader)


def test_unequal_shapes() -> None:
    planned = [list(range(start, start + 4)) for start in range(0, 40, 4)]
    data = Made(40, lambda index: torch.full((3 if index != 21 else 5,), index))
    iterator = iter(BOUNDED_8.loader(data, batch_sampler=planned, num_workers=2))
    text = str(error_of(RuntimeError, list, iterator))
    assert "[3]" in text and "[5]" in text and "need a collate_fn that pads them" in text


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(40))


class _NoStart(_Stream):
    def __iter__(self) -> Any:
        return iter([next(iter(()))])


def _cannot_begin(worker: int) -> None:
    raise StopIteration("no start")


def _cannot_join(samples: list[int]) -> list[int]:
    return samples if 17 not in samples else next(iter(()))


@pytest.mark.parametrize(
    ("data", "more"),
    [
        (range(40), {"collate_fn": _cannot_join}),
        (range(40), {"collate_fn": _cannot_join, "num_workers": 0}),
        (_Stream(), {"collate_fn": _cannot_join}),
        (_Stream(), {"collate_fn": _cannot_join, "num_workers": 0}),
        (_Stream(), {"worker_init_fn": _cannot_begin}),
        (_NoStart(), {}),
    ],
    ids=["collate", "collate, inline", "stream's collate", "the same inline", "start", "iter()"],
)
def test_stop_iteration_does_not_end_the_epoch_without_a_word(data: Any, more: dict[str, Any]) -> None:
    iterator = iter(DataLoader(data, 4, **{"num_workers": 1, **more}))
    text, before = "", []
    while not text:
        try:
            before.append(next(iterator))
        except RuntimeError as error:
            text = str(error)
    assert "StopIteration" in text
    if "collate_fn" in more:
        assert [*before, *iterator] == [list(range(lo, lo + 4)) for lo in range(0, 40, 4) if lo != 16]


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


@pytest.mark.parametrize("kind_of_worker", ["process", "thread"])
@pytest.mark.parametrize("kind", _KINDS)
def test_exceptions_that_cannot_be_made_of_a_text(kind: str, kind_of_worker: Any) -> None:
    """Their class, or a RuntimeError in its place; name, place and original traceback are there in any case."""
    make, arrives = _KINDS[kind]

    def raises_here(index: int) -> Any:
        if index == 17:
            raise make()
        return torch.tensor(index)

    with pytest.raises(arrives) as caught:
        list(DataLoader(Made(40, raises_here), 4, num_workers=2, worker_kind=kind_of_worker))
    assert type(caught.value) is arrives
    notes = "\n".join(getattr(caught.value, "__notes__", ()))
    text = notes if "Caught" in notes else str(caught.value)
    for part in (f"Caught {type(make()).__name__} in DataLoader worker", "index 17", "in raises_here"):
        assert part in text
    assert "the reason" in text or kind in ("a text of its own", "without a text")


class _Unloadable:
    """Can be sent, and not be loaded."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __reduce__(self) -> Any:
        return _cannot_be_loaded, (self.index,)


def _cannot_be_loaded(index: int) -> Any:
    raise ValueError(f"{index} cannot be loaded")


@pytest.mark.parametrize("mode", BY_PROCESSES, ids=lambda mode: mode.name)
def test_samples_that_no_other_worker_can_load(mode: Mode) -> None:
    """The worker that joins their batch prepares them, and what a collate function makes of them is fine.

    What was prepared twice is counted. How much that is depends: where one worker prepares all of a batch, nothing is.
    """
    prepared = _FORK.Array("i", 40)

    def make(index: int) -> Any:
        with prepared.get_lock():
            prepared[index] += 1
        return _Unloadable(index) if index in BAD else torch.tensor(index)

    def collate(samples: list[Any]) -> Any:
        return [sample.index if isinstance(sample, _Unloadable) else int(sample) for sample in samples]

    loader = mode.loader(Made(40, make), 4, num_workers=2, collate_fn=collate)
    assert sorted(numbers(loader)) == list(range(40))
    assert loader.stats()["samples_repeated"] == sum(prepared[index] for index in range(40)) - 40


def _raises_what_only_it_knows(index: int) -> Any:
    module = ModuleType("made_in_a_worker")
    sys.modules[module.__name__] = module
    exec("class Unknown(Exception): pass", module.__dict__)
    raise module.Unknown("the reason")


@pytest.mark.parametrize("mode", BY_PROCESSES, ids=lambda mode: mode.name)
def test_errors_of_a_class_that_only_workers_know(mode: Mode) -> None:
    data = Made(40, lambda index: _raises_what_only_it_knows(index) if index in BAD else torch.tensor(index))
    loader = mode.loader(data, 4, num_workers=2, on_error="skip")
    assert sorted(numbers(loader)) == GOOD
    assert loader.stats()["samples_failed"] == 4
    with pytest.raises(RuntimeError, match=r"(?s)Unknown, whose class cannot be loaded here.*the reason"):
        list(mode.loader(data, 4, num_workers=2))
