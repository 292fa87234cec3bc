"""What a read costs, fitted to those that were made."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minato_gpu.sources.read_costs import ReadCosts


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


def test_nothing_is_known_before_the_first() -> None:
    assert ReadCosts().seconds(10**6) == 0.0
    assert ReadCosts().compared(10**6) == 1.0, "a cost of nothing would be worth nothing"


def test_of_one_size_all_cost_the_same() -> None:
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


@pytest.mark.parametrize(
    ("nbytes", "seconds"),
    [([0, 0, 0], [0.1, 0.2, 0.3]), ([10, 1000], [0.5, 0.1]), ([10, 1000, 10**6], [0.0, 0.0, 5.0]), ([5], [0.0])],
    ids=["empty files", "larger ones are faster", "small ones take no time", "no time at all"],
)
def test_nothing_costs_less_than_nothing(nbytes: list[int], seconds: list[float]) -> None:
    costs = fitted(nbytes, seconds)
    for each in (0, 1, 10**3, 10**9):
        assert costs.seconds(each) >= 0.0
        assert costs.compared(each) >= 0.0


@given(st.lists(st.tuples(st.integers(0, 2**40), st.floats(0, 1e4)), min_size=1, max_size=50), st.integers(0, 2**40))
def test_any_reads(reads: list[tuple[int, float]], nbytes: int) -> None:
    costs = fitted([each for each, _ in reads], [took for _, took in reads])
    assert np.isfinite(costs.seconds(nbytes))
    assert np.isfinite(costs.compared(nbytes))
    assert min(costs.seconds(nbytes), costs.compared(nbytes)) >= 0.0
    assert costs.seconds(nbytes) <= costs.seconds(2 * nbytes + 1) * (1 + 1e-9) + 1e-12, "more never costs less"
