"""In which order a worker writes to the board, where its parent may look, or it may be killed, at any moment."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory.status_board import CHUNK, LIMIT, RING_FROM, RUN, STAGE, STARTED, WorkerStatusBoard
from tests.lanes.harness import Bench, job, open_links, piece, task
from tests.memory.watched import Event, fenced, watch


@pytest.fixture
def links() -> Iterator[WorkerChannels]:
    with open_links(1) as links:
        yield links


def _events(links: WorkerChannels) -> tuple[list[Event], WorkerStatusBoard]:
    events = watch(links.board)
    links.bell._words = links.board.words
    Bench(links, job(lambda key: key)).run(task(piece([1, 2, 3])))
    return events, links.board


def test_what_starts_is_said_before_the_limit_is_read(links: WorkerChannels) -> None:
    """Dekker's: the parent writes the limit, then reads what has started."""
    events, board = _events(links)
    row = board.row(0)
    looks = [at for at, event in enumerate(events) if event == ("read", row + LIMIT)]
    assert len(looks) == 3
    begin = 0
    for at in looks:
        assert fenced(events[begin : at + 1], ("write", row + STARTED), ("read", row + LIMIT))
        begin = at + 1


def test_a_worker_says_that_it_is_through_before_it_looks_whether_to_ring(links: WorkerChannels) -> None:
    """Where nobody is woken because all workers are busy, each looks at ATTENTION once more."""
    events, board = _events(links)
    assert events.count(("write", board.row(0) + CHUNK)) == 2, "it takes the task, and is through with it"
    end = len(events) - events[::-1].index(("write", board.row(0) + CHUNK)) - 1
    assert fenced(events[end:], ("write", board.row(0) + CHUNK), ("read", RING_FROM))


def test_a_task_begins_with_nothing_started(links: WorkerChannels) -> None:
    """One that is killed in between must not be taken to have been at a sample of its new task."""
    events, board = _events(links)
    row = board.row(0)
    begun = events[: events.index(("write", row + CHUNK))]
    for word in (STARTED, STAGE, RUN):
        assert ("write", row + word) in begun
