"""In which order the board is written and read: a worker and its parent look at it at the same time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from minato_gpu.memory.status_board import _ROW, CHUNK, HAND, LIMIT, RUN, SPLITS, STARTED, TAIL, WorkerStatusBoard
from tests.memory.watched import Event, before, fenced, watch


@pytest.fixture
def board() -> Iterator[WorkerStatusBoard]:
    board = WorkerStatusBoard(2)
    row = board.row(1)
    board.words[row + RUN], board.words[row + CHUNK] = 1, 5
    yield board
    board.close()


@pytest.fixture
def events(board: WorkerStatusBoard) -> list[Event]:
    return watch(board)


def test_samples_are_limited_before_it_is_read_which_have_started(
    board: WorkerStatusBoard, events: list[Event]
) -> None:
    """Dekker's: the worker says what it starts, then reads the limit."""
    assert board.revoke(1, 5, keep=3) == 3
    row = board.row(1)
    assert fenced(events, ("write", row + LIMIT), ("read", row + STARTED))


def test_a_worker_that_is_asked_to_hand_over_can_see_where(board: WorkerStatusBoard, events: list[Event]) -> None:
    board.hand_over(1, 5, [2, 3])
    row = board.row(1)
    assert fenced(events, ("write", row + SPLITS), ("write", row + HAND))


def test_a_block_is_in_the_ring_before_its_end_says_so(board: WorkerStatusBoard, events: list[Event]) -> None:
    tail = board.words[board.row(1) + TAIL]
    assert board.give_back(1, 4096)
    row = board.row(1)
    assert before(events, ("write", row + _ROW + tail), ("write", row + TAIL))
