"""Workers that rest until more are to be at work."""

from __future__ import annotations

import pytest

from minato_gpu.lanes.contract import Opened, Revoked
from minato_gpu.memory.status_board import CHUNK, RUN
from tests.lanes.contract import GATED, Trace
from tests.lanes.harness import piece, task
from tests.lanes.lanes import of_kind, open_lane, reports_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.mark.parametrize("threads", [False, True])
def test_one_that_rests_takes_no_task_until_it_is_to_work(threads: bool) -> None:
    trace = Trace()
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
    trace.gate.close()


@pytest.mark.parametrize("threads", [False, True])
def test_those_that_rest_leave_with_the_others(threads: bool) -> None:
    with open_lane(lambda key: key, 4, threads=threads, active=1):
        pass


def test_sent_to_rest_and_back_again_and_again() -> None:
    """The bells of those that stay at rest are not theirs to take."""
    with open_lane(lambda key: key, 4, active=1) as lane:
        for number in range(32):
            lane.resize(1 + number % 4)
            reports_of(lane, *(task(piece([number]), chunk=4 * number + at) for at in range(1, 5)))


def test_a_task_that_is_finished_is_not_taken_back_although_its_worker_is_not_through() -> None:
    """Its marks are told before the worker says that it is at nothing."""
    with open_lane(lambda key: key, 2, active=1) as lane:
        words, row = lane.links.board.words, lane.links.board.row(1)
        words[row + RUN], words[row + CHUNK] = 1, 9  # as one shows it that has just made its last mark
        lane.revoke(1, 9, 0)
        assert not [message for message in lane.receive() if isinstance(message, Revoked)]
        words[row + CHUNK] = -1
