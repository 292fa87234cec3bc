"""What workers say of finished tickets without a message, and in which order they write it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest

from minato_gpu.memory.completions import BLOB, IN_ROW, READY, ROW, TICKET_BYTES, Bell, Completions
from minato_gpu.memory.status_board import (
    AWAITED_BEGIN,
    AWAITED_END,
    AWAITED_NEED,
    WorkerStatusBoard,
)
from tests.memory.watched import Event, before, cleared_board, fenced, watch

RECORD, STATUS, COUNT, RING = "record", "status", "count", "ring"


@pytest.fixture
def completions() -> Iterator[Completions]:
    completions = Completions(64, memoryview(bytearray(64 * TICKET_BYTES)))
    yield completions
    completions.close()


@pytest.fixture
def board() -> Iterator[WorkerStatusBoard]:
    board = cleared_board(1)
    yield board
    board.close()


class Noted(Completions):
    """Notes what is done to it, and shows at each step what a parent could see."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__(64, memoryview(bytearray(64 * TICKET_BYTES)))
        self.events = events

    def record(self, *what: Any) -> None:
        self.events.append(RECORD)
        super().record(*what)

    def set_ready(self, begin: int, end: int, *, in_rows: bool) -> None:
        self.events.append(STATUS)
        super().set_ready(begin, end, in_rows=in_rows)

    def ready(self, begin: int, end: int) -> int:
        self.events.append(COUNT)
        return super().ready(begin, end)


class NotedBell(Bell):
    """Notes that it rings, and wakes nobody."""

    events: list[Event]

    def ring(self) -> None:
        self.events.append(RING)


@pytest.fixture
def bell(board: WorkerStatusBoard) -> Iterator[NotedBell]:
    events = watch(board)
    completions = Noted(events)
    bell = NotedBell(board, completions, -1, -1)
    bell.events = events
    yield bell
    completions.close()


class _Stores:
    """Status bytes that note which are stored."""

    def __init__(self, status: Any) -> None:
        self._status = status
        self.stored: list[int | slice] = []

    def __setitem__(self, at: int | slice, value: Any) -> None:
        self.stored.append(at)
        self._status[at] = value

    def release(self) -> None:
        self._status.release()


@pytest.mark.parametrize("in_rows", [True, False])
def test_each_status_byte_is_stored_once(completions: Completions, in_rows: bool) -> None:
    """A copy of several bytes may store some twice. Whoever sees the first may give the block to other tickets, for
    which the second would be a sample that nobody has prepared. The first ticket comes last: it may be a batch that
    was joined of them all, which must not be there in part where its worker is killed."""
    completions._status = stores = _Stores(completions._status)  # type: ignore[assignment]
    completions.set_ready(8, 13, in_rows=in_rows)
    assert stores.stored == [12, 11, 10, 9, 8]
    assert all(mark in READY for mark in completions.status[8:13])


def test_a_worker_writes_the_record_then_the_status_and_only_then_looks_who_waits(bell: NotedBell) -> None:
    bell.await_tickets(0, 4, 2)
    bell.events.clear()
    bell.publish(0, [1.0, 2.0], 9.0, 3.0, 0, None)
    events = bell.events
    assert fenced(events, RECORD, STATUS), "killed between the two, it would leave a status without a record"
    assert fenced(events, STATUS, ("read", AWAITED_NEED)), "else neither side might see the other"
    assert fenced(events, STATUS, COUNT)
    assert events[-1] == RING


def test_the_parent_says_what_it_waits_for_and_only_then_counts(bell: NotedBell) -> None:
    assert not bell.await_tickets(3, 8, 2)
    for word in (AWAITED_BEGIN, AWAITED_END, AWAITED_NEED):
        assert fenced(bell.events, ("write", word), COUNT)


def test_while_it_is_exchanged_nothing_is_awaited(bell: NotedBell) -> None:
    """A worker that looks in the middle must not count some tickets against the need of others."""
    bell.await_tickets(3, 8, 2)
    bell.events.clear()
    bell.await_tickets(10, 20, 1)
    assert bell.events[0] == ("write", AWAITED_NEED)
    rest = bell.events[1:]
    assert all(before(rest, ("write", word), ("write", AWAITED_NEED)) for word in (AWAITED_BEGIN, AWAITED_END))


@pytest.mark.parametrize(
    ("published", "rings"), [((3, 1), False), ((3, 2), True), ((0, 3), False), ((8, 2), False), ((7, 2), False)]
)
def test_it_rings_once_enough_of_what_is_awaited_is_there(
    bell: NotedBell, published: tuple[int, int], rings: bool
) -> None:
    bell.await_tickets(3, 8, 2)
    first, count = published
    bell.publish(first, [1.0] * count, 9.0, float(count), 0, None)
    assert (RING in bell.events) == rings


@pytest.mark.parametrize("locations", [None, [IN_ROW, (BLOB, 4096, 77), IN_ROW]])
@pytest.mark.parametrize("count", [1, 3])
def test_what_is_taken_is_what_was_recorded(
    completions: Completions, count: int, locations: Sequence[tuple[int, int, int]] | None
) -> None:
    took = [0.5, 0.25, 2.0][:count]
    locations = None if locations is None else locations[3 - count :][:count]
    completions.record(8, took, 100.5, sum(took), 3, locations)
    assert completions.ready(0, 64) == 0, "a record says nothing before its status does"
    completions.set_ready(8, 8 + count, in_rows=locations is None)
    assert completions.ready(0, 64) == completions.leading(8, 64) == count
    taken = completions.take(8, 8 + count)
    assert (taken.took, taken.elapsed, taken.ends, taken.worker) == (took, sum(took), [100.5] * count, 3)
    assert taken.locations == locations
    assert completions.ready(0, 64) == 0 and completions.status[8] not in READY, "it is taken once"


def test_a_block_that_is_used_again_begins_open(completions: Completions) -> None:
    first = completions.reserve(5)
    completions.record(first, [1.0] * 5, 1.0, 5.0, 0, [(ROW, 0, 0)] * 5)
    completions.set_ready(first, first + 5, in_rows=True)
    completions.give_back(first)
    assert completions.reserve(6) == first
    assert completions.ready(*completions.ready_anywhere) == 0


def test_blocks_never_overlap_and_an_end_raises(completions: Completions) -> None:
    begins = [completions.reserve(size) for size in (5, 8, 3, 16, 16)]
    spans = sorted(zip(begins, (8, 8, 4, 16, 16), strict=True))
    assert all(begin + size <= other for (begin, size), (other, _) in pairwise(spans))
    with pytest.raises(MemoryError, match="no more than 64 samples"):
        completions.reserve(16)
    completions.give_back(begins[3])
    assert completions.reserve(13) == begins[3]
