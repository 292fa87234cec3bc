"""Save and resume where something raises: a sampler, a batch, a stream, an interrupt."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler

from minato_gpu import DataLoader
from tests.contracts.datasets import Flaky, Made
from tests.contracts.modes import IN_ORDER
from tests.contracts.resuming import (
    DATA,
    RaisesOnce,
    loader_of,
    through_json,
)
from tests.contracts.samplers import (
    Counting,
)
from tests.support.raising import error_of


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
@pytest.mark.parametrize(("workers", "ahead"), [(0, None), (1, 1), (1, None), (2, None)])
def test_a_sampler_that_raises_once(workers: int, ahead: int | None, at: int, order: dict[str, Any]) -> None:
    """No batch is lost: the one that was at hand when the loader drew ahead comes before the error, and the sampler is
    asked again, where nothing is ahead, too: else the consumer would wait for a batch that nobody has drawn."""
    more = {**order, "prefetch_factor": ahead, "timeout": 60 if workers else 0}
    loader = DataLoader(DATA, None, sampler=RaisesOnce(at), num_workers=workers, **more)
    iterator = iter(loader)
    first = next(iterator)
    got, raised = _all_of(iterator, OSError)
    assert sorted([int(first), *got]) == DATA
    assert len(raised) == 1 and (raised[0] > 0 or (workers > 0 and ahead is None))


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
