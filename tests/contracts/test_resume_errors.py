"""Save and resume where something raises: a sampler, a batch, a stream, an interrupt."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, SequentialSampler

from minato_gpu import DataLoader
from tests.contracts.datasets import Made
from tests.contracts.modes import IN_ORDER
from tests.contracts.resuming import DATA, loader_of, through_json
from tests.contracts.samplers import Counting
from tests.support.raising import error_of


class RaisesOnce:
    """A sampler for one epoch, its own iterator: it raises when it comes to ``bad``, and goes on after that."""

    def __init__(self, bad: int) -> None:
        self.next, self.bad = 0, bad

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.next == self.bad:
            self.bad = -1
            raise OSError("the index server is away")
        if self.next == 40:
            raise StopIteration
        self.next += 1
        return self.next - 1


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
    """Every batch of this one comes; the next epoch is drawn when it begins, and is whole."""
    source = Away()
    loader = loader_of(SequentialSampler(source), num_workers=1, epochs=2, **order)
    iterator = iter(loader)
    first = next(iterator)
    source.away = True
    assert sorted(index for batch in chain([first], iterator) for index in batch.tolist()) == DATA
    with pytest.raises(OSError, match="the index server is away"):
        next(iter(loader))
    source.away = False
    assert sorted(index for batch in loader for index in batch.tolist()) == DATA
    assert loader.stats()["speculation"] == {"epochs_prepared": 0, "epochs_discarded": 0}


@pytest.mark.parametrize("order", [{}, {"in_order": False}], ids=["in order", "bounded"])
@pytest.mark.parametrize("at", [8, 39, 40])
@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize(("workers", "ahead"), [(0, None), (1, 1), (1, None), (2, None)])
def test_a_sampler_that_raises_once(
    workers: int, ahead: int | None, batches: bool, at: int, order: dict[str, Any]
) -> None:
    """No batch is lost, and the sampler is asked again, where nothing is ahead, too: else the consumer would wait for a
    batch that nobody has drawn. The error comes where the window comes to it, or later, but before what follows it.
    (Single samples in order are drawn together, as many as are worth it.)"""
    keys: Any = RaisesOnce(at)
    what = {"batch_sampler": zip(keys)} if batches else {"batch_size": None, "sampler": keys}
    more = {**order, "prefetch_factor": ahead, "timeout": 60 if workers else 0}
    loader: Any = DataLoader(DATA, num_workers=workers, **what, **more)
    iterator, got, raised = iter(loader), list[int](), list[int]()
    while len(raised) < 9:
        try:
            got += torch.as_tensor(next(iterator)).reshape(-1).tolist()
        except StopIteration:
            break
        except OSError:
            raised.append(len(got))
    assert sorted(got) == DATA
    window = max(1, workers * (ahead or 2))
    soonest = 1 if workers and not (batches or order) else at - window + 1
    assert len(raised) == 1 and soonest <= raised[0] <= at


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


class Dies(Counting):
    """A sampler that cannot go on after three quarters of its keys, for as long as ``away`` says so."""

    away = True

    def __iter__(self) -> Iterator[Any]:
        for key in super().__iter__():
            yield key
            if self.away and self.at == 72:
                raise OSError("the index server is away")


class DiesUntold(Dies):
    """The same, and nothing is known of it."""

    state_dict = load_state_dict = None  # type: ignore[assignment]


@pytest.mark.parametrize("batches", [2, 12, 17])
@pytest.mark.parametrize("sampler", [Dies, DiesUntold])
def test_no_state_takes_a_sampler_that_raised_for_one_that_ended(sampler: Any, batches: int) -> None:
    """Its error waits until the consumer comes to it. Until then a state leads to all that is left, or is refused."""

    def make() -> Any:
        return IN_ORDER.loader(Made(96, torch.tensor), 4, sampler=sampler(96), num_workers=1)

    loader = make()
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    if sampler is DiesUntold:
        for _ in range(2):
            with pytest.raises((ValueError, OSError), match=r"cannot be saved|the index server is away"):
                loader.state_dict()
    else:
        resumed = make()
        resumed.load_state_dict(through_json(loader.state_dict()))
        resumed.sampler.away = False
        assert sum(1 for _ in resumed) == 24 - batches
    with pytest.raises(OSError, match="the index server is away"):
        list(iterator)


class Flaky(IterableDataset[Any]):
    """A stream without a state, its own iterator, that raises once at this number, and goes on without it."""

    def __init__(self, bad: int) -> None:
        self.bad, self.at = bad, 0

    def __iter__(self) -> Iterator[int]:
        self.at = 0
        return self

    def __next__(self) -> int:
        if self.at == 16:
            raise StopIteration
        self.at += 1
        if self.at - 1 == self.bad:
            raise OSError("no network")
        return self.at - 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_raised_and_went_on(workers: int) -> None:
    """Without a state of its own it cannot be saved from then on: nobody knows where it would be if it were read again.
    The next epoch can."""
    loader: Any = DataLoader(Flaky(5), 2, num_workers=workers, collate_fn=str)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
        loader.state_dict()
    with pytest.raises(OSError, match="no network"):
        next(iterator)
    for _ in range(2):
        next(iterator)
        with pytest.raises(ValueError, match=r"cannot be saved: it has raised, and has no state of its own.* Give the"):
            loader.state_dict()
    list(iterator)
    assert loader.state_dict()["begun"] is False
