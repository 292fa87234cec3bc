"""P7 inside one process: however an epoch ends, no process, thread, shared memory or descriptor stays behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.contracts.datasets import Costly, Made, Streams
from tests.contracts.modes import BOUNDED_8, BOUNDED_8_THREADS, IN_ORDER, IN_ORDER_THREADS, PYTORCH, Mode
from tests.support.leaks import check_scenario
from tests.support.raising import error_of

_MODES = (PYTORCH, IN_ORDER, BOUNDED_8, IN_ORDER_THREADS, BOUNDED_8_THREADS)


def _normal_end(mode: Mode, **kept: Any) -> None:
    loader = mode.loader(Costly(20), 4, num_workers=2, **kept)
    for _ in range(2):
        assert len(list(loader)) == 5


def _break(mode: Mode, **kept: Any) -> None:
    for batch in mode.loader(Costly(400), 4, num_workers=2, **kept):
        assert len(batch) == 4
        break


def _before_the_first_batch(mode: Mode, **kept: Any) -> None:
    iter(mode.loader(Costly(400), 4, num_workers=2, **kept))


def _exception_in_the_loop(mode: Mode, **kept: Any) -> None:
    def loop() -> None:
        for _ in mode.loader(Costly(400), 4, num_workers=2, **kept):
            raise ArithmeticError("in the loop")

    error_of(ArithmeticError, loop)


def _failing_sample(mode: Mode, **kept: Any) -> None:
    def make(index: int) -> Any:
        if index == 9:
            raise ValueError("bad sample")
        return torch.tensor(index)

    error_of(ValueError, list, mode.loader(Made(40, make), 4, num_workers=2, **kept))


def _deleted_iterator(mode: Mode, **kept: Any) -> None:
    loader = mode.loader(Costly(400), 4, num_workers=2, **kept)
    iterator = iter(loader)
    next(iterator)
    del iterator
    del loader


def _loader_dies_before_its_iterator(mode: Mode, **kept: Any) -> None:
    loader = mode.loader(Costly(40), 4, num_workers=2, **kept)
    iterator = iter(loader)
    next(iterator)
    del loader
    assert len(list(iterator)) == 9


def _two_iterators(mode: Mode, **kept: Any) -> None:
    loader = mode.loader(Costly(400), 4, num_workers=2, **kept)
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    del first
    next(second)


def _never_iterated(mode: Mode, **kept: Any) -> None:
    mode.loader(Costly(400), 4, num_workers=2, **kept)


def _kept_batches(mode: Mode, **kept: Any) -> None:
    loader = mode.loader(Costly(40), 4, num_workers=2, **kept)
    batches = list(loader)
    del loader
    assert sorted(int(number) for batch in batches for number in batch) == list(range(40))


_SCENARIOS: list[Callable[..., None]] = [
    _normal_end,
    _break,
    _before_the_first_batch,
    _exception_in_the_loop,
    _failing_sample,
    _deleted_iterator,
    _loader_dies_before_its_iterator,
    _two_iterators,
    _never_iterated,
    _kept_batches,
]


@pytest.mark.parametrize("persistent", [False, True], ids=["fresh", "persistent"])
@pytest.mark.parametrize("scenario", _SCENARIOS, ids=lambda scenario: scenario.__name__.strip("_"))
@pytest.mark.parametrize("mode", _MODES, ids=lambda mode: mode.name)
def test_nothing_stays(mode: Mode, scenario: Callable[..., None], persistent: bool) -> None:
    check_scenario(lambda: scenario(mode, persistent_workers=persistent))


@pytest.mark.parametrize("mode", [mode for mode in _MODES if mode is not PYTORCH], ids=lambda mode: mode.name)
def test_garbage_in_a_reference_cycle(mode: Mode) -> None:
    """PyTorch's iterator takes five seconds per worker for this, so it is left out."""

    def scenario() -> None:
        iterator = iter(mode.loader(Costly(400), 4, num_workers=2))
        next(iterator)
        cycle: list[Any] = [iterator]
        cycle.append(cycle)
        del iterator, cycle
        gc.collect()

    check_scenario(scenario, limit_s=4.0)


@pytest.mark.parametrize("mode", _MODES, ids=lambda mode: mode.name)
def test_streams(mode: Mode) -> None:
    def scenario() -> None:
        loader = mode.loader(Streams([30, 3]), 4, num_workers=2 if mode.processes else 1)
        assert len(list(loader)) == (9 if mode.processes else 8)
        next(iter(loader))

    check_scenario(scenario)


@pytest.mark.parametrize("mode", _MODES, ids=lambda mode: mode.name)
def test_many_epochs_do_not_pile_up(mode: Mode) -> None:
    def scenario() -> None:
        loader = mode.loader(Costly(8), 4, num_workers=2, persistent_workers=True)
        for _ in range(10):
            assert len(list(loader)) == 2

    check_scenario(scenario)
