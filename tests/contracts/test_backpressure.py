"""P4 under a consumer that stops, and with samples whose sizes have nothing to do with each other."""

from __future__ import annotations

import multiprocessing
from functools import partial
from typing import Any

import pytest
import torch

from tests.contracts.checks import NOTHING, differences
from tests.contracts.datasets import Made
from tests.contracts.modes import MINATO, Mode
from tests.support.waiting import wait_until

_FORK = multiprocessing.get_context("fork")
_SMALL, _LARGE, _HUGE = 100, 100_000, 1_000_000  # float32 numbers of a sample
_BUDGET = 6 * _LARGE  # bytes: one and a half large samples


@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_a_consumer_that_stops(mode: Mode) -> None:
    """The window fills up, and nothing beyond it is begun: 2 batches ahead for each of 2 workers."""
    begun = _FORK.Value("i", 0)

    def make(index: int) -> Any:
        with begun.get_lock():
            begun.value += 1
        return torch.full((_LARGE,), float(index))

    loader = mode.loader(Made(400, make), 4, num_workers=2, prefetch_factor=2)
    batches = iter(loader)
    for full in (4 * 5, 4 * 6, 4 * 7):
        next(batches)
        assert wait_until(partial(_reaches, begun, full))
        assert loader.stats()["bytes_in_flight_peak"] <= 1.05 * (4 * 4 + 2) * 4 * _LARGE
    assert begun.value == 4 * 7


def _reaches(begun: Any, samples: int) -> bool:
    return bool(begun.value == samples)


def _size(index: int) -> int:
    return _HUGE if index == 17 else _LARGE if index % 10 == 3 else _SMALL


@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_sizes_that_vary_ten_thousand_times(mode: Mode) -> None:
    """One sample is larger than the whole budget: it passes. Else the budget and a sample per slot are the most."""
    data = Made(60, lambda index: torch.full((_size(index),), float(index)))
    loader = mode.loader(data, None, num_workers=2, host_memory_budget=_BUDGET)
    received = []
    for sample in loader:
        assert bool((sample == sample[0]).all())
        received.append((int(sample[0]), len(sample)))
    assert differences([(index, _size(index)) for index in range(60)], received) == NOTHING
    assert loader.stats()["bytes_in_flight_peak"] <= 1.05 * (_BUDGET + 4 * (_HUGE + _LARGE))
    assert loader.stats()["bytes_in_flight"] == 0
