"""What workers write to shared memory, in which order, and what their parent reads there of their leases."""

from __future__ import annotations

import pytest

from minato_gpu.lanes.base import Extra, Report
from minato_gpu.lanes.leases import Leases, lay_down
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory.status_board import CHUNK, LIMIT, RING_FROM, RUN, STAGE, STARTED, WorkerStatusBoard
from tests.lanes.harness import Bench, job, marked, piece, task
from tests.memory.watched import Event, fenced, watch


def _add(leases: Leases, links: WorkerChannels, run: int, *chunks: int) -> None:
    for chunk in chunks:
        leases.add(marked(links, task(piece([chunk]), chunk=chunk)._replace(run=run)))


def test_leases_of_a_run_that_was_given_up_silence_none_of_the_next(links: WorkerChannels) -> None:
    """Its numbers are high, those of the next begin with 0: compared with them no end would ring."""
    leases = Leases(links)
    _add(leases, links, 1, 500, 501, 502)
    _add(leases, links, 2, 0, 1, 2, 3)
    assert leases.low(3) == 0


def test_what_a_worker_that_died_had_laid_down_is_not_given_back_to_its_successor(links: WorkerChannels) -> None:
    leases = Leases(links)
    store = Store(0, links, links.arenas[0])
    sent = marked(links, task(piece([1, 2])))
    leases.add(sent)
    mark = sent.pieces[0].marks
    lying = [lay_down(Extra(["text"]), None, at, store, links) for at in (mark, mark + 1)]
    while links.board.give_back(0, 0):
        pass  # it takes nothing back any more: what else is to be given back must wait
    links.bell.publish(mark, [1e-3] * 2, 0.0, 2e-3, 0, lying)
    assert leases.reports([], unfinished=True)[0].final
    leases.bury(0)
    links.board.forget(0)
    other = marked(links, task(piece([3]), chunk=2))
    leases.add(other)
    successor = Store(1, links, links.arenas[1])
    one = lay_down(Extra(["text"]), None, other.pieces[0].marks, successor, links)
    links.bell.publish(other.pieces[0].marks, [1e-3], 0.0, 1e-3, 1, [one])
    assert leases.reports([], unfinished=True)[0].final
    assert links.board.returned(0) == [] and links.board.returned(1) == [one[1]]


@pytest.mark.parametrize("took", [1e-3, 1e-7])
def test_of_costly_samples_it_is_told_when_each_ended(links: WorkerChannels, took: float) -> None:
    leases = Leases(links)
    sent = marked(links, task(piece([1, 2, 3])))
    leases.add(sent)
    mark = sent.pieces[0].marks
    links.bell.publish(mark, [took], 5.0, took, 0, None)
    links.bell.publish(mark + 1, [took] * 2, 7.0, 2 * took, 0, None)
    (report,) = leases.reports([], unfinished=False)
    assert report.end == 7.0
    assert report.ends == ([5.0, 7.0, 7.0] if took > 1e-4 else None)


def test_what_is_described_late_takes_nothing_back(links: WorkerChannels) -> None:
    """A worker describes its first sample before it marks it; the mark may be seen first, of a lease that goes on."""
    leases = Leases(links)
    sent = marked(links, task(piece([1, 2])))
    leases.add(sent)
    mark, described = sent.pieces[0].marks, Report(*sent[:2], 0, 0, 0, 0.0, 0.0, 0.0, False, layout=b"rows")
    links.bell.publish(mark, [1e-3], 5.0, 1e-3, 0, None)
    (first,) = leases.reports([], unfinished=True)
    assert leases.reports([described], unfinished=True) == [described]
    links.bell.publish(mark + 1, [1e-3], 7.0, 1e-3, 0, None)
    (second,) = leases.reports([], unfinished=True)
    assert [(each.first, each.done, each.final) for each in (first, second)] == [(0, 1, False), (1, 2, True)]


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
