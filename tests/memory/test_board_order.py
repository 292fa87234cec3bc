"""In which order the board is written and read: a worker and its parent look at it at the same time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from minato_gpu.memory.status_board import (
    _ROW,
    CHUNK,
    HAND,
    LIMIT,
    NO_LIMIT,
    RUN,
    SPLITS,
    STARTED,
    TAIL,
    WorkerStatusBoard,
)
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
            assert self._words[self._row + LIMIT] < 7, "it stops after the sample that it is at"
            for word, value in ((CHUNK, -1), (LIMIT, NO_LIMIT), (STARTED, 0), (CHUNK, 6)):
                self._words[self._row + word] = value
        self._left -= 1
        return int(self._words[at])

    def __setitem__(self, at: int, value: int) -> None:
        self._words[at] = value

    def release(self) -> None:
        """As a memoryview."""
        self._words.release()


@pytest.mark.parametrize("moment", range(2))
def test_no_sample_is_taken_back_that_was_begun_before_the_worker_went_on_to_its_next_task(
    board: WorkerStatusBoard, moment: int
) -> None:
    """It was prepared twice else, the second time into a row that had been delivered and was another sample's."""
    board.words = words = _Moving(board, moment)  # type: ignore[assignment]
    assert board.revoke(1, 5, keep=3) is None, "too late: what it was through with it tells by itself"
    assert words.moved


def test_a_worker_that_is_asked_to_hand_over_can_see_where(board: WorkerStatusBoard, events: list[Event]) -> None:
    board.hand_over(1, 5, [2, 3])
    row = board.row(1)
    assert fenced(events, ("write", row + SPLITS), ("write", row + HAND))


def test_a_block_is_in_the_ring_before_its_end_says_so(board: WorkerStatusBoard, events: list[Event]) -> None:
    tail = board.words[board.row(1) + TAIL]
    assert board.give_back(1, 4096)
    row = board.row(1)
    assert before(events, ("write", row + _ROW + tail), ("write", row + TAIL))
