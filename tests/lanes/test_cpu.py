"""The CPU lane, with processes and with threads: recall, revoke, what is finished of a lease, closing."""

from __future__ import annotations

import select
import threading
from time import perf_counter
from typing import Any

import pytest

from minato_gpu.lanes.base import Report
from minato_gpu.lanes.contract import Exit, Opened, Progress, Recalled, Revoked
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.thread_lane import ThreadLane
from minato_gpu.memory.status_board import STARTED
from tests.lanes.harness import job, marked, open_links, piece, task
from tests.lanes.lanes import FORK, arrived, fetch, of_kind, open_lane, reports_of, sort
from tests.support.leaks import threads_since
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.parametrize("threads", [False, True], ids=["processes", "threads"]),
]


def gated() -> Any:
    """An event that works between processes and between threads, and a data set that waits for it at key 5."""
    gate = FORK.Event()

    def make(key: int) -> int:
        assert key != 5 or gate.wait(30)
        return key

    return gate, make


def started(lane: Any, chunk: int) -> int:
    """How many samples of a chunk of run 1 have begun; 0 when no worker is at it."""
    worker = lane.links.board.find(1, chunk)
    return 0 if worker is None else lane.links.board.words[lane.links.board.row(worker) + STARTED]


def test_waiting_tasks_are_recalled_and_the_others_done(threads: bool) -> None:
    gate, make = gated()
    with open_lane(make, threads=threads) as lane:
        store = Store(-1, lane.links)
        lane.send(task(piece([5]), chunk=1))
        assert wait_until(lambda: lane.links.board.find(1, 1) is not None)
        for chunk in range(2, 9):
            lane.send(task(piece(["k" * 200_000 if chunk == 4 else chunk]), chunk=chunk))
        lane.recall()
        [recalled] = of_kind(lane, Recalled)
        assert sorted(recalled.tasks) == [(1, chunk) for chunk in range(2, 9)]
        lane.recall()
        assert lane.receive() == []
        assert lane.links.engine_arena.allocated == 0, "a recalled task keeps its memory"
        gate.set()
        found = reports_of(lane, task(piece([30]), chunk=30))
        assert sorted(found) == [1, 30] and fetch(lane, store, found[1]) == [5]


def test_samples_that_have_not_started_are_revoked(threads: bool) -> None:
    gate, make = gated()
    with open_lane(make, 2, threads=threads) as lane:
        store = Store(-1, lane.links)
        assert lane.receive() == [Opened(2)]
        lane.revoke(1, 7, 0)
        lane.look()
        assert lane.receive() == [Progress(())]
        lane.send(task(piece(range(20)), chunk=7))
        assert wait_until(lambda: started(lane, 7) == 6)
        found: dict[int, list[Report]] = {}
        lane.revoke(1, 7, 15)
        assert sort(lane, found) == [Revoked(1, 7, 15)]
        lane.revoke(1, 7, 0)
        assert sort(lane, found) == [Revoked(1, 7, 6)], "sample 5 is at work and stays"
        lane.revoke(2, 7, 0)
        assert sort(lane, found) == [], "another run's chunk"
        gate.set()
        assert wait_until(lambda: arrived(lane, found, 7))
        assert fetch(lane, store, found[7]) == list(range(6))


def test_who_takes_samples_back_is_told_what_those_before_have_come_to(threads: bool) -> None:
    """They are not reported yet, and what they hold is of the worker's credit (P4)."""
    gate, make = gated()
    with open_lane(lambda key: bytes(1000 * make(key)), 2, threads=threads) as lane:
        assert lane.receive() == [Opened(2)]
        lane.send(task(piece(range(20)), chunk=7, credit=1 << 20))
        assert wait_until(lambda: started(lane, 7) == 6)
        lane.revoke(1, 7, 0)
        [revoked] = of_kind(lane, Revoked)
        assert revoked.keep == 6 and 10_000 <= revoked.nbytes < 11_000, "0 to 4 thousand bytes, and what tells of them"
        gate.set()
        assert reports_of(lane, task(piece([30]), chunk=30))


def test_what_is_finished_of_a_lease_can_be_asked_for(threads: bool) -> None:
    gate, make = gated()
    with open_lane(make, 2, threads=threads) as lane:
        lane.send(marked(lane.links, task(piece(range(10)), chunk=3, singly=True)))
        found: dict[int, list[Report]] = {3: []}

        def reported() -> bool:
            found[3] += lane.receive([(1, 3)])
            return bool(found[3]) and found[3][-1].done == 5

        assert wait_until(reported), "the samples before the slow one were not reported"
        assert not found[3][-1].final and lane.receive() == [Opened(2)]
        lane.look()
        [progress] = lane.receive()
        [at] = progress.at_work
        assert at.claim[:3] == (1, 3, 6) and at.since < perf_counter()
        gate.set()
        assert wait_until(lambda: arrived(lane, found, 3))
        lane.look()
        assert lane.receive() == [Progress(())]


def test_addressed_tasks_reach_their_worker(threads: bool) -> None:
    with open_lane(lambda key: key, 3, threads=threads, addressed=True) as lane:
        for worker in (2, 0, 1, 1):
            report = reports_of(lane, task(piece([1]), chunk=10 + worker), worker=worker)[10 + worker][-1]
            assert report.worker == worker


def test_free_workers_take_what_waits(threads: bool) -> None:
    """One worker is stuck; the other does all the rest."""
    gate, make = gated()
    with open_lane(make, 2, threads=threads) as lane:
        lane.send(task(piece([5]), chunk=1))
        found = reports_of(lane, *(task(piece([8]), chunk=chunk) for chunk in range(2, 30)))
        assert 1 not in found and len({report.worker for reports in found.values() for report in reports}) <= 2
        gate.set()
        assert wait_until(lambda: arrived(lane, found, 1))


def test_closing_twice_and_with_tasks_waiting(threads: bool) -> None:
    with open_lane(lambda key: key, threads=threads) as lane:
        for chunk in range(50):
            lane.send(task(piece(range(100)), chunk=chunk))
        assert lane.close(5.0)
        assert lane.close(5.0)


def test_a_stuck_sample_at_the_end(threads: bool) -> None:
    """A process is ended; a thread cannot be, which is said, and its memory stays."""
    gate, make = gated()
    with open_links(1, arenas=not threads) as links:
        if not threads:
            with open_lane(make) as lane:
                lane.send(task(piece([5]), chunk=1))
                assert wait_until(lambda: lane.links.board.find(1, 1) is not None)
                assert lane.close(0.0)
            return
        before, thread_lane = threading.enumerate(), ThreadLane(links, job(make, seeds_samples=False))
        thread_lane.send(task(piece([5, 6]), chunk=1))
        assert wait_until(lambda: links.board.find(1, 1) is not None)
        with pytest.warns(RuntimeWarning, match="1 worker threads are still busy"):
            assert not thread_lane.close(0.01)
        gate.set()
        assert thread_lane.close(20.0)
        assert not threads_since(before)


def test_who_closes_begins_no_other_sample(threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, make = gated()
    begun = FORK.RawValue("i", 0)

    def count(key: int) -> Any:
        begun.value += 1
        return make(key)

    with open_lane(count, threads=threads) as lane:
        lane.send(task(piece([5, 6]), chunk=1))
        assert wait_until(lambda: started(lane, 1) == 1)
        for chunk in (2, 3):
            lane.send(task(piece([chunk]), chunk=chunk))
        if threads:
            with pytest.warns(RuntimeWarning, match="1 worker threads are still busy"):
                assert not lane.close(0.01)
            gate.set()
        else:  # once the worker has been told to leave
            close = lane._pool.close
            monkeypatch.setattr(lane._pool, "close", lambda timeout: (gate.set(), close(timeout)))
        assert lane.close(20.0)
        assert begun.value == 1


def _ends(key: int) -> Any:
    raise SystemExit("enough")


@pytest.mark.parametrize("kind", ["run", "inspect"])
def test_a_worker_that_is_ended_by_its_sample_is_told(threads: bool, kind: str) -> None:
    with open_lane(_ends, threads=threads) as lane:
        lane.send(task(piece([1, 2]), kind=kind))
        assert wait_until(lambda: select.select(lane.fault_fds(), [], [], 0)[0])
        [ended] = of_kind(lane, Exit)
        assert not lane.receive()
        assert ended.error == "SystemExit"
        assert "SystemExit: enough" in ended.message() and "_ends" in ended.message()


def test_a_large_task_that_is_asked_for_keeps_no_memory(threads: bool) -> None:
    """However its end is told."""
    with open_lane(len, threads=threads) as lane:
        lane.send(marked(lane.links, task(piece(["k" * 200_000]), chunk=4)))
        told: list[Any] = []

        def is_told() -> bool:
            told.extend(lane.receive([(1, 4)]))
            return bool(told)

        assert wait_until(is_told)
        assert told[-1].final and lane.links.engine_arena.allocated == 0
