"""Arithmetic of spans, against sets and lists of their numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minato_gpu.scheduling.spans import add, count, cut, joined, number_at, shifted, singles, tickets, without
from tests.support.tickets import spans as made

PIECES = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=6)


def rising(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans of the given lengths, each after a gap."""
    out, at = [], 0
    for gap, size in pieces:
        out.append((at + gap, at + gap + size))
        at += gap + size
    return out


def numbers(spans: object) -> list[int]:
    return [number for lo, hi in spans for number in range(lo, hi)]  # type: ignore[attr-defined]


@given(PIECES, st.integers(0, 30), st.integers(0, 30))
def test_cut_by_offsets(pieces: list[tuple[int, int]], start: int, stop: int) -> None:
    spans = rising(pieces)[::-1]
    assert numbers(cut(spans, start, stop)) == numbers(spans)[start:stop]
    assert all(lo < hi for lo, hi in cut(spans, start, stop))
    assert [number_at(spans, offset) for offset in range(count(spans))] == numbers(spans)


@given(PIECES, st.data())
def test_one_more_is_put_where_it_belongs(pieces: list[tuple[int, int]], data: st.DataObject) -> None:
    spans = rising(pieces)
    gaps = [(lo, hi) for lo, hi in without([(0, 99)], spans) if lo < hi]
    lo, hi = data.draw(st.sampled_from(gaps))
    a = data.draw(st.integers(lo, hi - 1))
    b = data.draw(st.integers(a + 1, hi))
    expected = {*numbers(spans), *range(a, b)}
    add(spans, (a, b))
    assert spans == joined((number, number + 1) for number in sorted(expected))


def test_singles_and_shifts() -> None:
    spans = made((3, 5), (5, 6), (8, 9))
    assert joined(singles(tickets(spans))) == [(3, 6), (8, 9)]
    assert shifted(spans, -3) == [(0, 2), (2, 3), (5, 6)]
