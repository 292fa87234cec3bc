"""The window's length: how it grows and shrinks, and what that is worth under a virtual clock."""

from __future__ import annotations

import numpy as np
import pytest

from minato_gpu.lab.simulation.virtual_loader import VirtualLoader
from minato_gpu.lab.simulation.work import Work
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.window_length import WindowLength


def grown(most: int, limit: int = 1000) -> WindowLength:
    """A window that has grown by as much as it may."""
    window = WindowLength(most, limit)
    for _ in range(most):
        window.lengthen(0, 10.0)
        window.grown = False
    assert window.extra == most
    return window


def test_it_grows_by_one_batch_and_again_once_that_is_admitted() -> None:
    window = WindowLength(5, 100)
    window.lengthen(10, 20.0)
    window.lengthen(10, 20.0)
    assert (window.extra, window.grown) == (1, True)
    window.grown = False
    window.lengthen(10, 20.0)
    assert window.extra == 2


@pytest.mark.parametrize(("in_flight", "batch_bytes"), [(81, 20.0), (0, 0.0)], ids=["too many bytes", "size unknown"])
def test_it_does_not_grow(in_flight: int, batch_bytes: float) -> None:
    window = WindowLength(5, 100)
    window.lengthen(in_flight, batch_bytes)
    assert (window.extra, window.grown) == (0, False)


def test_it_has_a_longest_length() -> None:
    window = grown(2)
    window.lengthen(0, 10.0)
    assert (window.extra, window.longest) == (2, 2)


def test_it_shrinks_after_as_many_batches_as_it_may_grow_by() -> None:
    window = grown(3)
    lengths = []
    for _ in range(7):
        window.delivered(1, 0)
        lengths.append(window.extra)
    assert lengths == [3, 3, 2, 2, 2, 1, 1]


def test_it_shrinks_at_once_where_it_holds_too_much() -> None:
    window = grown(3)
    window.delivered(1, 1001)
    assert (window.extra, window.longest) == (2, 3)


def simulated(work: Work, more_batches: int, window_bytes: int = 1 << 30, period: float = 0.0) -> tuple[float, int]:
    """Seconds, and batches by which the window grew; at first it has four. (A simulated sample takes 1,000 bytes.)"""
    policy = Policy(4 * work.batch, more_batches=more_batches, window_bytes=window_bytes)
    loader = VirtualLoader(work, policy, period, trip_s=2e-4, precise=True)
    return loader.run().makespan_s, loader.scheduler.window.longest


HEAD_OF_LINE = Work(np.where(np.arange(64) % 16, 0.01, 1.0), np.full(64, np.nan), 4, (64,), slots=2)
"""Every 16th of 64 samples takes 1 s; two workers need 2.3 s at least."""


def test_slow_samples_are_prepared_side_by_side() -> None:
    seconds, _ = simulated(HEAD_OF_LINE, 0)
    assert seconds == pytest.approx(4.0, abs=0.05)
    seconds, more = simulated(HEAD_OF_LINE, 28)
    assert seconds == pytest.approx(2.3, abs=0.05) and 1 <= more < 28


def test_not_beyond_the_limit_of_bytes() -> None:
    assert simulated(HEAD_OF_LINE, 28, 4_000)[1] == 0


def test_a_reserve_is_prepared_where_samples_are_unlike() -> None:
    """5 % of the samples take 40 times as long; a consumer asks for as much as the workers can do at most."""
    costs = np.full(1500, 0.003)
    costs[np.random.default_rng(11).choice(1500, 75, replace=False)] = 0.12
    work = Work(costs, costs, 16, (1500,), slots=2)
    period = float(costs.sum()) / 2 / work.batches
    fixed, growing = (period * work.batches / (simulated(work, more, period=period)[0] + period) for more in (0, 28))
    assert fixed < 0.94 and growing > 0.95


def test_it_stays_where_samples_are_alike() -> None:
    costs = np.random.default_rng(3).uniform(0.002, 0.004, 1500)
    work = Work(costs, costs, 16, (1500,), slots=2)
    assert simulated(work, 28, period=1.2 * float(costs.sum()) / 2 / work.batches)[1] == 0
