"""A few cases in which all pairs of values occur."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.covering import Case, pairwise


def _full(*sizes: int) -> list[Case]:
    names = [f"factor {number}" for number in range(len(sizes))]
    return [dict(zip(names, values, strict=True)) for values in product(*map(range, sizes))]


def _covered(cases: list[Case]) -> set[Any]:
    return {pair for case in cases for strength in (1, 2) for pair in combinations(sorted(case.items()), strength)}


@given(st.lists(st.integers(1, 4), min_size=0, max_size=4), st.data())
def test_all_pairs_that_occur_are_kept(sizes: list[int], data: st.DataObject) -> None:
    """Of any set of cases: a test may leave out combinations that mean nothing."""
    full = _full(*sizes)
    cases = data.draw(st.lists(st.sampled_from(full), unique_by=str)) if full else []
    chosen = pairwise(cases)
    assert chosen == sorted(set(chosen))
    assert _covered([cases[at] for at in chosen]) == _covered(cases)
    assert chosen == pairwise(cases)
    assert bool(chosen) == bool(cases)


@pytest.mark.parametrize(
    ("sizes", "most"), [((2, 2, 2), 4), ((3, 3, 3), 10), ((3, 2, 3), 10), ((2, 2, 2, 2, 2), 8), ((4, 4, 2), 17)]
)
def test_they_are_few(sizes: tuple[int, ...], most: int) -> None:
    assert len(pairwise(_full(*sizes))) <= most


@pytest.mark.parametrize("sizes", [(5,), (4, 3)])
def test_of_one_or_two_factors_all_are_kept(sizes: tuple[int, ...]) -> None:
    assert pairwise(_full(*sizes)) == list(range(len(_full(*sizes))))


def test_cases_with_fewer_factors_are_kept_once() -> None:
    cases: list[Case] = [{"mode": "in order", "workers": 2}, {"workers": 0}, {"mode": "bounded", "workers": 2}]
    assert pairwise([*cases, *cases]) == [0, 1, 2]
    assert pairwise([{}, {}]) == [0]


def test_values_that_are_to_occur_alone_take_turns_with_the_others() -> None:
    cases = _full(2, 6)
    chosen = [cases[at] for at in pairwise(cases, frozenset({"factor 0", "factor 1"}))]
    assert [case["factor 1"] for case in chosen] == [0, 2, 4, 1, 3, 5]
    assert [case["factor 0"] for case in chosen] == [0, 0, 0, 1, 1, 1]
