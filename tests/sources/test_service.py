"""What the reader process does between the loader and the pool, with a pool that a test finishes by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minato_gpu.sources.blocks import copy
from tests.sources.by_hand import SIZE, Bench, content, key
from tests.support.examples import half


@pytest.fixture
def bench() -> Any:
    made = Bench()
    yield made
    made.arena.close()


def test_a_ticket_is_told_once_all_its_sources_are_there(bench: Bench) -> None:
    bench.want(0, [(0, (key("a"), key("b"))), (1, (key("c"),)), (2, ())])
    assert bench.told == {2: ()}
    bench.finish(1)
    assert list(bench.told) == [2]
    bench.finish(0)
    assert bench.got(0) == [content("a", SIZE), content("b", SIZE)]
    bench.finish(2)
    assert bench.got(1) == [content("c", SIZE)]


def test_what_cannot_be_read_is_missing_and_the_worker_finds_out_why(bench: Bench) -> None:
    bench.want(0, [(0, (key("a"), key("b")))])
    bench.finish(0, error=FileNotFoundError("a"))
    bench.finish(1)
    assert bench.got(0) == [content("b", SIZE)]
    assert bench.service.counts()["failed"] == 1


def test_tickets_share_what_they_both_want(bench: Bench) -> None:
    bench.want(0, [(0, (key("a"),)), (1, (key("a"),))])
    assert len(bench.pool.under_way) == 1
    bench.finish(0)
    bench.service.release([0])
    assert bench.got(1) == [content("a", SIZE)], "the other still needs it"
    bench.want(2, [(2, (key("a"),))])
    assert bench.got(2) == [content("a", SIZE)]
    bench.service.release([1, 2])
    assert bench.got(2) == [None]
    assert bench.arena.allocated == 0


def test_released_memory_is_never_taken_for_what_it_was(bench: Bench) -> None:
    bench.want(0, [(0, (key("a"),))])
    bench.finish(0)
    old = bench.told[0][0]
    bench.service.release([0])
    bench.want(1, [(1, (key("b"),))])
    bench.finish(1)
    assert bench.told[1][0][0] == old[0]
    assert copy(bench.arena, *old[:3]) is None


def test_reads_stay_below_the_limit_but_for_the_oldest_place() -> None:
    bench = Bench(limit=3 * SIZE)
    wanted = [key(f"{number}", SIZE) for number in range(8)]
    bench.want(0, [(number, (wanted[number],)) for number in range(4)])
    bench.want(4, [(number, (wanted[number],)) for number in range(4, 8)])
    assert list(bench.pool.under_way) == [0, 1, 2, 3], "the oldest place must be complete some time"
    for number in range(4):
        bench.finish(number)
    bench.service.release([1])
    assert not bench.pool.under_way
    bench.service.release([2, 3])
    assert list(bench.pool.under_way) == [4, 5], "two more, beside the one that is there"
    bench.service.release([0])
    assert list(bench.pool.under_way) == [4, 5, 6, 7]
    bench.arena.close()


def test_what_is_wanted_again_much_later_does_not_stay_until_then() -> None:
    """A small set of large samples, whose next epoch is known: it would stay in memory as a whole."""
    bench = Bench(limit=3 * SIZE)
    for epoch in range(3):
        for sample in range(10):
            number = 10 * epoch + sample
            bench.want(number, [(number, (key(f"{sample}", SIZE),))])
    for number in range(30):
        while number not in bench.told:
            bench.finish(min(bench.pool.under_way))
        assert bench.got(number) == [content(f"{number % 10}", SIZE)]
        assert bench.service.counts()["bytes_ahead"] <= 4 * SIZE
        bench.service.release([number])
    assert bench.service.counts()["reads"] == 30
    assert bench.arena.allocated == 0
    bench.arena.close()


def test_a_new_run_gets_nothing_of_the_old_one(bench: Bench) -> None:
    bench.want(0, [(0, (key("a"),)), (1, (key("b"),))])
    bench.finish(0)
    bench.service.drop()
    assert bench.pool.cancelled == [1]
    bench.told.clear()
    bench.want(0, [(1, (key("c"),))])
    bench.finish(1)
    assert bench.told == {}, "what has come is the old ticket's"
    bench.finish(2)
    assert bench.got(1) == [content("c", SIZE)]
    bench.service.release([1])
    assert bench.arena.allocated == 0


@half()
@given(st.data())
def test_any_course(data: st.DataObject) -> None:
    """Every ticket is told once, with its bytes; in the end no memory is in use; the limit holds."""
    limit = data.draw(st.sampled_from([SIZE, 4 * SIZE, 100 * SIZE]))
    bench = Bench(limit)
    sources, waiting, wanted, next_ticket = dict[int, list[str]](), set[int](), set[int](), 0
    for _ in range(data.draw(st.integers(1, 40))):
        step = data.draw(st.sampled_from(["want", "finish", "release", "drop"]))
        if step == "want":
            size = data.draw(st.integers(1, 3))
            tickets = []
            for number in range(next_ticket, next_ticket + size):
                paths = data.draw(st.lists(st.sampled_from("abcdef"), max_size=2, unique=True))
                sources[number] = paths
                tickets.append((number, tuple(key(path, SIZE) for path in paths)))
            bench.want(next_ticket, tickets)
            wanted.update(range(next_ticket, next_ticket + size))
            next_ticket += size
        elif step == "finish" and bench.pool.under_way:
            number = data.draw(st.sampled_from(sorted(bench.pool.under_way)))
            bench.finish(number, error=OSError() if data.draw(st.integers(0, 4)) == 0 else None)
        elif step == "release" and (there := sorted(wanted & bench.told.keys())):
            number = data.draw(st.sampled_from(there))
            found = {place[3] for place in bench.told[number]}
            assert found <= set(sources[number])
            assert bench.got(number) == [content(place[3], SIZE) for place in bench.told[number]]
            bench.service.release([number])
            wanted.discard(number)
        elif step == "drop":
            bench.service.drop()
            wanted.clear()
        waiting = wanted - bench.told.keys()
    while waiting:
        bench.finish(min(bench.pool.under_way))
        waiting = wanted - bench.told.keys()
        bench.service.release(sorted(wanted & bench.told.keys()))
        wanted -= bench.told.keys()
    bench.service.release(sorted(wanted))
    while bench.pool.under_way:
        bench.finish(min(bench.pool.under_way))
    assert bench.arena.allocated == 0
    assert bench.service.counts()["bytes_ahead"] == 0
    bench.arena.close()
