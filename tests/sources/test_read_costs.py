"""What a read costs, fitted to those that were made, and what the storage gives, measured while it is waited for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minato_gpu.sources.memory_tier import ReadCosts
from minato_gpu.sources.pool import StorageRate


def fitted(nbytes: list[int], seconds: list[float]) -> ReadCosts:
    costs = ReadCosts()
    for each, took in zip(nbytes, seconds, strict=True):
        costs.observe(each, took)
    return costs


def test_a_latency_and_a_rate_are_found() -> None:
    random = np.random.default_rng(1)
    nbytes = random.integers(1000, 10**6, 3000)
    costs = fitted(nbytes.tolist(), ((0.02 + nbytes / 5e6) * random.lognormal(0, 0.3, 3000) / 1.046).tolist())
    for each in (1000, 10**5, 10**6):
        assert costs.seconds(each) == pytest.approx(0.02 + each / 5e6, rel=0.1, abs=0.005)
    assert costs.compared(10**6) / costs.compared(1000) == pytest.approx(0.22 / 0.0202, rel=0.2)


def test_of_one_size_all_cost_the_same() -> None:
    assert ReadCosts().seconds(10**6) == 0.0 and ReadCosts().compared(10**6) == 1.0, "before anything is known"
    costs = fitted([3000] * 50, np.random.default_rng(1).exponential(0.01, 50).tolist())
    assert costs.seconds(3000) == costs.seconds(10**6) == pytest.approx(0.01, rel=0.5)
    assert costs.compared(3000) == 1.0


def test_a_storage_that_becomes_ten_times_faster_makes_old_and_new_reads_compare() -> None:
    sizes = np.random.default_rng(1).integers(1000, 10**6, 4000).tolist()
    costs = fitted(sizes, [0.1 + each / 1e6 for each in sizes])
    before = costs.compared(10**5), costs.compared(10**6)
    for _ in range(2):
        for each in sizes:
            costs.observe(each, 0.01 + each / 1e7)
    assert costs.seconds(10**6) == pytest.approx(0.11, rel=0.1), "it is of today"
    assert (costs.compared(10**5), costs.compared(10**6)) == pytest.approx(before, rel=0.05)


@example([(0, 0.1), (0, 0.3)], 5)
@example([(10, 0.5), (1000, 0.1)], 10**9)  # larger ones are faster
@example([(10, 0.0), (1000, 0.0), (10**6, 5.0)], 1)
@given(st.lists(st.tuples(st.integers(0, 2**40), st.floats(0, 1e4)), min_size=1, max_size=50), st.integers(0, 2**40))
def test_any_reads(reads: list[tuple[int, float]], nbytes: int) -> None:
    costs = fitted([each for each, _ in reads], [took for _, took in reads])
    assert np.isfinite(costs.seconds(nbytes))
    assert np.isfinite(costs.compared(nbytes))
    assert min(costs.seconds(nbytes), costs.compared(nbytes)) >= 0.0
    assert costs.seconds(nbytes) <= costs.seconds(2 * nbytes + 1) * (1 + 1e-9) + 1e-12, "more never costs less"


def test_only_stretches_count_in_which_too_little_was_there() -> None:
    rate = StorageRate()
    for at in range(100):
        rate.finished(0.01 * at, 1, behind=False)
    assert rate.bytes_per_s == 0.0
    for at in range(100, 200):
        rate.finished(0.01 * at, 1000, behind=True)
    assert 99_000 < rate.bytes_per_s < 101_000
    for at in range(200, 1000):
        rate.finished(0.01 * at, 1, behind=at % 5 > 0)  # never for long
    assert 99_000 < rate.bytes_per_s < 101_000
