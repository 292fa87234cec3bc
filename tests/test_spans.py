"""Ranges with holes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minato_gpu.samples import TicketId
from minato_gpu.scheduling.messages import singles
from minato_gpu.spans import without


def _numbers(spans: list[tuple[int, int]]) -> list[int]:
    return [number for lo, hi in spans for number in range(lo, hi)]


@given(st.sets(st.integers(0, 60)))
def test_what_is_left_is_in_the_order_of_the_spans(taken: set[int]) -> None:
    spans = [(40, 61), (0, 7), (7, 9), (12, 40)]
    holes = singles(sorted(TicketId(number) for number in taken if number in set(_numbers(spans))))
    left = list(without(spans, holes))
    assert _numbers(left) == [number for number in _numbers(spans) if number not in taken]
    assert all(lo < hi for lo, hi in left)


def test_holes_may_be_long_and_touch() -> None:
    assert list(without([(0, 9)], [(2, 3), (3, 5), (7, 9)])) == [(0, 2), (5, 7)]
