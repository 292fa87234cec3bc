"""The CPU lane, with processes and with threads, beside what the contract says of every lane: credits, closing, rest,
large messages; what workers write to shared memory, in which order, and what their parent reads there."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from typing import Any

import pytest

from minato_gpu.lanes.base import Extra, Features, Item, TicketOutcome
from minato_gpu.lanes.contract import KeptSamples, Opened
from minato_gpu.lanes.leases import Lease, Leases, store_outcome, store_reads
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory.status_board import (
    CHUNK,
    LIMIT,
    RING_FROM,
    RUN,
    STAGE,
    STARTED,
    STOPPED,
    WorkerStatusBoard,
    base_of,
)
from tests.lanes.contract import GATED, Trace
from tests.lanes.harness import Bench, items_of, job, marked, piece, task
from tests.lanes.lanes import FORK, of_kind, open_lane, reports_of
from tests.memory.watched import Event, fenced, watch
from tests.support import leaks
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("no_leaks")
both_kinds = pytest.mark.parametrize("threads", [False, True], ids=["processes", "threads"])


@pytest.fixture
def trace() -> Iterator[Trace]:
    """Samples that are noted, one of which waits."""
    made = Trace()
    yield made
    made.gate.set()
    made.gate.close()


def started(lane: Any, chunk: int) -> int:
    """How many samples of a chunk of run 1 have begun; 0 when no worker is at it."""
    worker = lane.links.board.find(1, chunk)
    return 0 if worker is None else lane.links.board.words[lane.links.board.row(worker) + STARTED]


@both_kinds
def test_who_takes_samples_back_is_told_what_those_before_have_come_to(threads: bool, trace: Trace) -> None:
    """They are not reported yet, and what they hold is of the worker's credit (P4)."""
    with open_lane(lambda key: bytes(1000 * trace.make(key)), 2, threads=threads) as lane:
        assert lane.receive() == [Opened(2)]
        lane.send(task(piece(range(20)), chunk=7, credit=1 << 20))
        assert wait_until(lambda: started(lane, 7) == 6)
        lane.revoke(1, 7, 0)
        [revoked] = of_kind(lane, KeptSamples)
        assert revoked.keep == 6 and 10_000 <= revoked.nbytes < 11_000, "0 to 4 thousand bytes, and what tells of them"
        trace.gate.set()
        assert reports_of(lane, task(piece([30]), chunk=30))


def test_a_worker_that_is_stuck_at_the_end_is_ended(trace: Trace) -> None:
    with open_lane(trace.make) as lane:
        lane.send(task(piece([GATED]), chunk=1))
        assert wait_until(lambda: lane.links.board.find(1, 1) is not None)
        assert lane.close(0.0)


@both_kinds
def test_who_closes_begins_no_other_sample(threads: bool, trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread cannot be ended, which is said; its memory stays until it leaves."""
    with open_lane(trace.make, threads=threads) as lane:
        lane.send(task(piece([GATED, 6]), chunk=1))
        assert wait_until(lambda: started(lane, 1) == 1)
        for chunk in (2, 3):
            lane.send(task(piece([chunk]), chunk=chunk))
        if threads:
            with pytest.warns(RuntimeWarning, match="1 worker threads are still busy"):
                assert not lane.close(0.01)
            trace.gate.set()
        else:  # once the worker has been told to leave
            close = lane._pool.close

            def goes_on(timeout: float) -> Any:
                trace.gate.set()
                return close(timeout)

            monkeypatch.setattr(lane._pool, "close", goes_on)
        assert lane.close(20.0)
        assert [trace.begun(key) for key in (GATED, 6, 2, 3)] == [1, 0, 0, 0]


@both_kinds
def test_one_that_rests_takes_no_task_until_it_is_to_work(threads: bool, trace: Trace) -> None:
    with open_lane(trace.make, 3, threads=threads, active=1) as lane:
        assert lane.slots == 1 and of_kind(lane, Opened) == [Opened(1)]
        lane.send(task(piece([GATED]), chunk=1))
        assert wait_until(lambda: trace.begun(GATED) == 1)
        lane.send(task(piece([7]), chunk=2))
        assert trace.begun(7) == 0
        lane.resize(2)
        assert of_kind(lane, Opened) == [Opened(1)]
        assert [report.worker for report in reports_of(lane, task(piece([8]), chunk=3))[3]] == [1]
        assert trace.begun(7) == 1, "by the same worker, before that"
        trace.gate.set()
        lane.resize(1)
        assert lane.slots == 1 and of_kind(lane, Opened) == [Opened(-1)]


def test_a_task_that_is_finished_is_not_taken_back_although_its_worker_is_not_through() -> None:
    """Its marks are told before the worker says that it is at nothing."""
    with open_lane(lambda key: key, 2, active=1) as lane:
        words, row = lane.links.board.words, lane.links.board.row(1)
        words[row + RUN], words[row + CHUNK] = 1, 9  # as one shows it that has just made its last mark
        lane.revoke(1, 9, 0)
        assert not [message for message in lane.receive() if isinstance(message, KeptSamples)]
        words[row + CHUNK] = -1


def test_more_tasks_than_the_sockets_hold_wait_their_turn() -> None:
    """Sending never blocks, though no worker takes anything; nothing is lost and the order stays."""
    gate = FORK.Event()

    def make(key: Any) -> Any:
        assert gate.wait(30)
        return key[:4]

    with open_lane(make) as lane:
        store = Store(-1, lane.links)
        tasks = [task(piece([f"{chunk:04}" + "-" * 60_000]), chunk=chunk) for chunk in range(1, 200)]
        for one in tasks:
            lane.send(one)
        gate.set()
        found = reports_of(lane, task(piece(["last"]), chunk=1000))
        assert list(found) == [*range(1, 200), 1000]
        for chunk in range(1, 200):
            assert [store.get(item) for item in items_of(found[chunk])] == [f"{chunk:04}"]


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
    locations = [store_outcome(TicketOutcome(Extra(["text"])), at, store, links) for at in (mark, mark + 1)]
    while links.board.give_back(0, 0):
        pass  # it takes nothing back any more: what else is to be given back must wait
    links.bell.publish(mark, [1e-3] * 2, 0.0, 2e-3, 0, locations)
    assert leases.reports(unfinished=True)[0].final
    leases.bury(0)
    links.board.forget(0)
    other = marked(links, task(piece([3]), chunk=2))
    leases.add(other)
    successor = Store(1, links, links.arenas[1])
    one = store_outcome(TicketOutcome(Extra(["text"])), other.pieces[0].marks, successor, links)
    links.bell.publish(other.pieces[0].marks, [1e-3], 0.0, 1e-3, 1, [one])
    assert leases.reports(unfinished=True)[0].final
    assert links.board.returned(0) == [] and links.board.returned(1) == [one[1]]


def test_a_workers_reports_come_in_the_order_of_its_work(
    links: WorkerChannels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends two leases while they are looked at, one after the other: batches of a stream changed places."""
    leases = Leases(links)
    sent = [marked(links, task(piece([key]), chunk=key)) for key in (1, 2)]
    for each in sent:
        leases.add(each)
    look, to_end = leases._done, list(sent)

    def looked(lease: Lease) -> int | None:
        found = look(lease)
        while to_end:
            links.bell.publish(to_end.pop(0).pieces[0].marks, [1e-3], 0.0, 1e-3, 0, None)
        return found

    monkeypatch.setattr(leases, "_done", looked)
    assert [report.chunk for _ in range(2) for report in leases.reports(unfinished=True)] == [1, 2]


def test_host_reads_of_a_piece_come_in_one_block(links: WorkerChannels) -> None:
    leases, store = Leases(links), Store(0, links, links.arenas[0])
    sent = marked(links, task(piece([1, 2]), kind="inspect"))
    leases.add(sent)
    reads: list[Item] = [Features(store.put({"path": str(key)}), (float(key),)) for key in (1, 2)]
    assert store_reads([reads[0], None], store) is None
    locations = store_reads(reads, store)
    assert locations is not None
    links.bell.publish(sent.pieces[0].marks, [1e-3] * 2, 0.0, 2e-3, 0, locations)
    (report,) = leases.reports(unfinished=True)
    assert report.items == reads and links.board.returned(0) == [locations[0][1]]


def test_nothing_is_kept_of_a_thread_that_ended_before_its_samples_were_taken(links: WorkerChannels) -> None:
    leases = Leases(links)
    sent = marked(links, task(piece([1, 2])))
    leases.add(sent)
    mark, store = sent.pieces[0].marks, Store(0, links)
    store_outcome(TicketOutcome(Extra(["text"])), mark + 1, store, links)
    assert list(links.completions.local) == [mark + 1]
    leases.drop(*sent[:2])
    assert not links.completions.local


@pytest.mark.parametrize("next_task", [False, True])
def test_a_worker_may_stop_before_a_sample_that_it_had_said_it_begins(links: WorkerChannels, next_task: bool) -> None:
    """It says so, then reads the limit: its parent takes the sample for begun, and learns where it has stopped."""
    bench = Bench(links, job(lambda key: key))
    sent, other = (marked(links, task(piece([1, 2, 3]), chunk=chunk)) for chunk in (1, 2))
    words, row = links.board.words, links.board.row(0)
    for each in (sent, other):
        bench.leases.add(each)
    words[row + RUN], words[row + CHUNK], words[row + STARTED] = 1, 1, 2
    assert links.board.revoke(0, 1, 1, 1) == 2
    bench.leases.revoked(1, 1, 2, 0)
    links.bell.publish(sent.pieces[0].marks, [1e-3], 5.0, 1e-3, 0, None)
    words[row + STOPPED], words[row + CHUNK] = base_of(1, 1) + 1, 2
    if next_task:
        bench.leases.settle(0)
        words[row + STOPPED] = base_of(1, 2)
    (report,) = bench.told(unfinished=False)
    assert (report.chunk, report.done, report.final) == (1, 1, True)


def test_what_was_taken_back_is_not_returned(links: WorkerChannels) -> None:
    """Its mark is another worker's by then."""

    def make(key: int) -> bytes:
        bench.revoke(1)
        return bytes(10)

    bench: Bench = Bench(links, job(make))
    (report,) = bench.run(task(piece([1, 2, 3]), credit=1))
    assert (report.done, report.final) == (1, True)
    assert links.completions.ready(*links.completions.ready_anywhere) == 0


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


def _channels() -> WorkerChannels:
    return WorkerChannels(3, addressed=True, arenas=True, active=1)


def test_where_descriptors_run_out_none_stays_open() -> None:
    """Whichever is the first that cannot be had."""
    _channels().close()  # what is made once is there
    before, failed = sorted(leaks.open_links()), 0
    for limit in range(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0]):
        try:
            with leaks.descriptors_below(limit):
                _channels().close()
            break
        except OSError:
            failed += 1
        assert sorted(leaks.open_links()) == before
    assert failed > 20, failed  # so many there are, at least


@pytest.mark.parametrize("took", [1e-3, 1e-7])
def test_of_costly_samples_it_is_told_when_each_ended(links: WorkerChannels, took: float) -> None:
    leases = Leases(links)
    sent = marked(links, task(piece([1, 2, 3])))
    leases.add(sent)
    mark = sent.pieces[0].marks
    links.bell.publish(mark, [took], 5.0, took, 0, None)
    links.bell.publish(mark + 1, [took] * 2, 7.0, 2 * took, 0, None)
    (report,) = leases.reports(unfinished=False)
    assert report.end == 7.0
    assert report.ends == ([5.0, 7.0, 7.0] if took > 1e-4 else None)
