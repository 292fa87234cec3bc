"""Save and resume where something raises: a batch, the sampler, an interrupt."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler

from minato_gpu import DataLoader
from minato_gpu.delivery import EpochIterator
from tests.contracts.datasets import Made
from tests.contracts.resuming import DATA, RaisesOnce, going_on, loader_of, through_json
from tests.support.raising import error_of


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_does_not_reach_the_device(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after any other error, a consumer that goes on has dealt with it, and later states can be loaded."""
    loader = loader_of(num_workers=workers)
    calls = []

    def full(iterator: EpochIterator, batch: Any) -> Any:
        calls.append(batch)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return batch

    monkeypatch.setattr(EpochIterator, "_placed", full)
    iterator = iter(loader)
    assert going_on(iterator, 3, RuntimeError) == 1
    resumed = loader_of(num_workers=workers)
    resumed.load_state_dict(through_json(loader.state_dict()))
    assert next(iter(resumed)).tolist() == [8, 9, 10, 11], "the consumer does not have it yet"
    assert going_on(iterator, 3, RuntimeError) == 0
    assert loader.state_dict()["progress"] == {"batches": 6, "below": 24, "above": ""}
    resumed.load_state_dict(through_json(loader.state_dict()))
    assert [index for batch in resumed for index in batch.tolist()] == DATA[24:]


def _all_of(iterator: Iterator[Any], error: type[Exception]) -> tuple[list[Any], list[int]]:
    """What comes until the end, and after how many batches each error did; it is asked on after each."""
    got: list[Any] = []
    raised: list[int] = []
    while True:
        try:
            got.append(torch.as_tensor(next(iterator)).tolist())
        except StopIteration:
            return got, raised
        except error:
            raised.append(len(got))


def test_the_next_epoch_cannot_be_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch at hand comes first; the next epoch then begins as if nothing had been tried."""
    loader = loader_of(num_workers=1, epochs=2)
    iterator = iter(loader)
    next(iterator)
    prefetch = loader._session.engine.prefetch

    def raises(source: Any) -> None:
        prefetch(source)
        raise OSError("the index server is away")

    monkeypatch.setattr(loader._session.engine, "prefetch", raises)
    got, raised = _all_of(iterator, OSError)
    assert [index for batch in got for index in batch] == DATA[4:]
    assert len(raised) == 1 and raised[0] > 0, "after the batch that was at hand"
    assert [index for batch in loader for index in batch.tolist()] == DATA


class Away:
    """What a sampler draws from. Its length cannot be had while it is ``away``."""

    def __init__(self) -> None:
        self.away = False

    def __len__(self) -> int:
        if self.away:
            raise OSError("the index server is away")
        return 40


@pytest.mark.parametrize("order", [{}, {"in_order": False}], ids=["in order", "bounded"])
def test_a_sampler_that_raises_for_the_next_epoch(order: dict[str, Any]) -> None:
    """Every batch of this one comes, one of them and then the error; the next epoch is whole."""
    source = Away()
    loader = loader_of(SequentialSampler(source), num_workers=1, epochs=2, **order)
    iterator = iter(loader)
    first = next(iterator).tolist()
    source.away = True
    got, raised = _all_of(iterator, OSError)
    source.away = False
    assert sorted(index for batch in [first, *got] for index in batch) == DATA
    assert len(raised) == 1 and raised[0] > 0
    assert sorted(index for batch in loader for index in batch.tolist()) == DATA
    assert loader.stats()["speculation"] == {"epochs_prepared": 0, "epochs_discarded": 0}


@pytest.mark.parametrize("order", [{}, {"in_order": False}], ids=["in order", "bounded"])
@pytest.mark.parametrize("at", [8, 39, 40])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_sampler_that_raises_once(workers: int, at: int, order: dict[str, Any]) -> None:
    """No batch is lost: the one that was at hand when the loader drew ahead comes before the error."""
    loader = DataLoader(DATA, None, sampler=RaisesOnce(at), num_workers=workers, **order)
    iterator = iter(loader)
    first = next(iterator)
    got, raised = _all_of(iterator, OSError)
    assert sorted([int(first), *got]) == DATA
    assert len(raised) == 1 and raised[0] > 0


def test_an_error_that_nobody_asks_for_keeps_nothing_alive() -> None:
    """And who asks is told where it came from."""
    loader = DataLoader(DATA, None, sampler=RaisesOnce(8), num_workers=1)
    iterator = iter(loader)
    engine = iterator._engine
    while engine.epochs.raised.kept is None:
        next(iterator)
    text = "".join(engine.epochs.raised.kept.__notes__)
    assert "index server is away" in text and "in __next__" in text and "resuming.py" in text
    left = weakref.ref(iterator)
    gc.disable()
    try:
        del iterator
        assert left() is None and engine.closed
    finally:
        gc.enable()


@pytest.mark.parametrize("batches", [7, 9, 12])
def test_a_state_after_a_sampler_raised(batches: int) -> None:
    """What had been delivered by then, whether the error has come or not."""
    loader = DataLoader(DATA, None, sampler=RaisesOnce(8), num_workers=1)
    iterator = iter(loader)
    raised = going_on(iterator, batches, OSError)
    done = batches - raised
    assert loader.state_dict()["progress"] == {"batches": done, "below": done, "above": ""}


def test_an_interrupt_while_it_draws_comes_at_once() -> None:
    """And a save says that the consumer does not have the batch."""

    class Interrupted(RaisesOnce):
        def __iter__(self) -> Any:
            for index in range(40):
                if index == 8:
                    raise KeyboardInterrupt
                yield index

    loader = DataLoader(DATA, None, sampler=Interrupted(8), num_workers=1)
    iterator, got = iter(loader), list[int]()
    error_of(KeyboardInterrupt, got.extend, iterator)
    assert got == list(range(len(got))) and len(got) < 8
    assert loader.state_dict()["progress"]["below"] == len(got)


def test_a_sampler_that_raises_longer_than_batches_are_at_hand() -> None:
    """It is asked again each time: nobody waits for a batch that has not been drawn."""
    loader: Any = DataLoader(DATA, None, sampler=RaisesOnce(8, times=12), num_workers=1, timeout=10)
    iterator = iter(loader)
    assert going_on(iterator, 30, OSError) == 12
    assert loader.state_dict()["progress"] == {"batches": 18, "below": 18, "above": ""}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("goes_on", [False, True], ids=["left out", "raised"])
def test_batches_that_never_came_are_not_counted_as_read_ahead(workers: int, goes_on: bool) -> None:
    """``ahead`` batches are those that the consumer has had: one of bad samples alone was never handed over."""

    def make() -> Any:
        data = Made(40, lambda n: 1 // 0 if 8 <= n < 12 else torch.tensor(n))
        return DataLoader(data, 4, num_workers=workers, on_error="raise" if goes_on else "skip")

    loader = make()
    iterator, got = iter(loader), list[Any]()
    while len(got) < 4:
        try:
            got.append(next(iterator).tolist())
        except ZeroDivisionError:
            continue
    assert got == [[0, 1, 2, 3], [4, 5, 6, 7], [12, 13, 14, 15], [16, 17, 18, 19]]
    for ahead, used in ((1, 3), (2, 2), (3, 1), (4, 0)):
        resumed = make()
        resumed.load_state_dict(through_json(loader.state_dict(ahead=ahead)))
        assert next(iter(resumed)).tolist() == got[used]
    with pytest.raises(ValueError, match="the last 4 can be taken back"):
        loader.state_dict(ahead=5)
