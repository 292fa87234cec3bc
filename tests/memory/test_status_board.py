"""The board: samples taken back before they start, the ring of freed blocks, and the order of writes and reads."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minato_gpu.memory.status_board import (
    _RING,
    _ROW,
    CHUNK,
    HAND,
    JOINING,
    LIMIT,
    RUN,
    SPLITS,
    STAGE,
    STARTED,
    STOPPED,
    TAIL,
    Claim,
    WorkerStatusBoard,
    base_of,
)
from tests.memory.watched import Event, before, cleared_board, fenced, watch


@pytest.fixture
def board() -> Iterator[WorkerStatusBoard]:
    board = cleared_board(3)
    yield board
    board.close()


def take(board: WorkerStatusBoard, worker: int, run: int, chunk: int) -> None:
    """What a worker writes when it takes a chunk."""
    row = board.row(worker)
    for word, value in ((STARTED, 0), (RUN, run), (CHUNK, chunk)):
        board.words[row + word] = value


def test_what_has_not_started_is_taken_back(board: WorkerStatusBoard) -> None:
    take(board, 0, run=1, chunk=5)
    board.words[board.row(0) + STARTED] = 3
    assert board.revoke(0, 1, 5, keep=8) == 8
    assert board.words[board.row(0) + LIMIT] == base_of(1, 5) + 8
    assert board.revoke(0, 1, 5, keep=1) == 3, "sample 2 runs already and is not taken back"
    assert board.revoke(0, 1, 6, keep=0) is None


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(-3000, 9000), max_size=30))
def test_the_ring_gives_back_in_order_across_its_end(steps: list[int]) -> None:
    """Positive: the parent frees so many; negative: the worker looks. Against a list as the model."""
    board = cleared_board(1)
    sent, waiting, received = 0, 0, 0
    for step in (*steps, -1):
        if step > 0:
            for _ in range(step):
                accepted = board.give_back(0, 4096 * sent)
                assert accepted == (waiting < _RING)
                sent += accepted
                waiting += accepted
        else:
            offsets = board.returned(0)
            assert offsets == [4096 * number for number in range(received, sent)]
            received, waiting = sent, 0
    assert board.returned(0) == []
    board.close()


def test_what_a_dead_worker_had_taken(board: WorkerStatusBoard) -> None:
    """The inbox tells, whether or not the worker came to say that it has begun."""
    assert board.claim(1) == Claim(-1, -1, 0, 0)
    board.inbox(1)[:16] = struct.pack("qq", 3, 7)
    assert board.claim(1) == Claim(3, 7, 0, 0)
    take(board, 1, 3, 6)
    assert board.claim(1) == Claim(3, 7, 0, 0), "what it shows is of the chunk before"
    take(board, 1, 3, 7)
    board.words[board.row(1) + STARTED] = 4
    board.words[board.row(1) + STAGE] = JOINING
    assert board.claim(1) == Claim(3, 7, 4, JOINING)
    board.words[board.row(1) + CHUNK] = -1
    assert board.claim(1) == Claim(3, 7, 0, 0), "it is through"
    assert board.claim(0) == board.claim(2) == Claim(-1, -1, 0, 0)
    assert board.give_back(1, 4096)
    board.forget(1)
    assert board.claim(1) == Claim(-1, -1, 0, 0) and board.returned(1) == []


# --- in which order it is written and read ---------------------------------------------------------------------


@pytest.fixture
def events(board: WorkerStatusBoard) -> list[Event]:
    """Of the board, whose worker 1 is at chunk 5."""
    take(board, 1, run=1, chunk=5)
    return watch(board)


def test_samples_are_limited_before_it_is_read_which_have_started(
    board: WorkerStatusBoard, events: list[Event]
) -> None:
    """Dekker's: the worker says what it starts, then reads the limit."""
    assert board.revoke(1, 1, 5, keep=3) == 3
    row = board.row(1)
    assert fenced(events, ("write", row + LIMIT), ("read", row + STARTED))
    assert fenced(events, ("read", row + STARTED), ("read", row + CHUNK))


class _Moving:
    """Words of a board whose worker 1 goes on from sample 6 of chunk 5 to chunk 6, just before the parent reads for the
    ``moment``-th time."""

    def __init__(self, board: WorkerStatusBoard, moment: int) -> None:
        self._words, self._row, self._left = board.words, board.row(1), moment
        self._words[self._row + STARTED] = 7

    @property
    def moved(self) -> bool:
        """Whether it came to that."""
        return self._left < 0

    def __getitem__(self, at: int) -> int:
        if self._left == 0:
            assert self._words[self._row + LIMIT] < base_of(1, 5) + 7, "it stops after the sample that it is at"
            for word, value in ((STOPPED, base_of(1, 5) + 7), (CHUNK, -1), (STARTED, 0), (CHUNK, 6)):
                self._words[self._row + word] = value
        self._left -= 1
        return int(self._words[at])

    def __setitem__(self, at: int, value: int) -> None:
        self._words[at] = value

    def release(self) -> None:
        self._words.release()


@pytest.mark.parametrize("moment", range(2))
def test_no_sample_is_taken_back_that_was_begun_before_the_worker_went_on_to_its_next_task(
    board: WorkerStatusBoard, moment: int
) -> None:
    """It was prepared twice else, the second time into a row that had been delivered and was another sample's."""
    take(board, 1, run=1, chunk=5)
    board.words = words = _Moving(board, moment)  # type: ignore[assignment]
    assert board.revoke(1, 1, 5, keep=3) == 7, "where it has stopped"
    assert words.moved
    assert board.stopped(1, 1, 6) is None and board.stopped(1, 2, 5) is None, "that is of no other task"


def test_a_worker_that_is_asked_to_hand_over_can_see_where(board: WorkerStatusBoard, events: list[Event]) -> None:
    board.hand_over(1, 5, [2, 3])
    row = board.row(1)
    assert fenced(events, ("write", row + SPLITS), ("write", row + HAND))


def test_a_block_is_in_the_ring_before_its_end_says_so(board: WorkerStatusBoard, events: list[Event]) -> None:
    tail = board.words[board.row(1) + TAIL]
    assert board.give_back(1, 4096)
    row = board.row(1)
    assert before(events, ("write", row + _ROW + tail), ("write", row + TAIL))
