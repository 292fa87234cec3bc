"""Which copies fill a batch: few, complete, never across a pinned piece's end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minato_gpu.memory.copies import MOST, CopyRange, plan


def test_a_slab_is_one_copy() -> None:
    assert plan([CopyRange(4096, 0, 600), CopyRange(4696, 600, 40)]) == [CopyRange(4096, 0, 640)]


def test_gaps_that_the_device_fills_are_bridged_smallest_first() -> None:
    runs = [CopyRange(1000 + at, at, 10) for at in (0, 20, 50, 100, 170)]
    assert plan(runs, most=5) == runs
    assert plan(runs, most=4) == [CopyRange(1000, 0, 30), *runs[2:]]
    assert plan(runs, most=2) == [CopyRange(1000, 0, 110), runs[4]]
    assert plan(runs, most=1) == [CopyRange(1000, 0, 180)]


def test_rows_that_lie_apart_differently_cannot_be_joined() -> None:
    runs = [CopyRange(1000 * at, 10 * at, 10) for at in range(9)]
    assert plan(runs) is None
    assert plan(runs[:MOST]) == runs[:MOST]


def test_no_copy_crosses_the_end_of_a_pinned_piece() -> None:
    assert plan([CopyRange(90, 5, 30)], ends=[100, 110, 200]) == [
        CopyRange(90, 5, 10),
        CopyRange(100, 15, 10),
        CopyRange(110, 25, 10),
    ]
    assert plan([CopyRange(90, 5, 30)], ends=[100, 110, 200], most=2) is None


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5), st.sampled_from([0, 1000])), max_size=40),
    st.lists(st.integers(0, 1200), max_size=3),
    st.integers(1, 8),
)
def test_every_byte_that_is_wanted_arrives(parts: list[tuple[int, int, int]], ends: list[int], most: int) -> None:
    """And what else is written lies in gaps between runs, where nothing wanted is."""
    runs, at = [], 0
    for nbytes, gap, apart in parts:
        runs.append(CopyRange(at + apart, at, nbytes))
        at += nbytes + gap
    found = plan(runs, sorted(ends), most)
    if found is None:
        return
    assert len(found) <= most
    source_of = {run.target + n: run.source + n for run in found for n in range(run.nbytes)}
    assert len(source_of) == sum(run.nbytes for run in found), "a byte is written twice"
    for run in runs:
        for n in range(run.nbytes):
            assert source_of[run.target + n] == run.source + n
    for run in found:
        assert not any(run.source < end < run.source + run.nbytes for end in ends)
