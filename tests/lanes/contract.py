"""What every lane must do (see minato_gpu/lanes/contract.py): a new kind of lane subclasses ``LaneContract``.

A subclass says how such a lane is made, over samples that ``Trace.make`` prepares, wherever they are. What only some
kinds can do is asked where the lane says that it can: ``can_kill``, ``shows_progress``, and ``retiring`` of the
subclass.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import select
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple, TypeVar

import pytest

from minato_gpu.lanes.base import Report, Task
from minato_gpu.lanes.contract import (
    AtWork,
    Exit,
    KeptSamples,
    Lane,
    Message,
    Opened,
    Progress,
    Recalled,
    Retired,
)
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.scheduling.messages import CPU, DEVICE
from tests.support.waiting import wait_until

GATED = 5
_FORK = multiprocessing.get_context("fork")
_Kind = TypeVar("_Kind", bound=Message)


class Gate:
    """An event that a process may be killed waiting for."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC)

    def set(self) -> None:
        """Let all pass, from now on."""
        os.eventfd_write(self._fd, 1)

    def wait(self, limit_s: float) -> bool:
        """Whether it is set in time."""
        return bool(select.select([self._fd], [], [], limit_s)[0])

    def close(self) -> None:
        """Nobody waits any more."""
        os.close(self._fd)


class Trace:
    """Which samples have been begun, seen from whichever process prepares them; sample GATED waits for ``gate``."""

    def __init__(self) -> None:
        self.gate = Gate()
        self._begun = _FORK.RawArray("i", 256)

    def make(self, key: int) -> int:
        """Sample ``key``."""
        self._begun[key] += 1
        assert key != GATED or self.gate.wait(30)
        return key

    def begun(self, key: int) -> int:
        """How often this sample has been begun."""
        return int(self._begun[key])


class Made(NamedTuple):
    """A lane, its channels, on which a consumer waits, and what makes tasks for it: of these keys, with this run and
    chunk."""

    lane: Lane
    links: WorkerChannels
    task: Callable[[Sequence[int], int, int], Task]


class Site:
    """A lane under test, and all that it has told."""

    def __init__(self, made: Made, trace: Trace) -> None:
        self.lane, self.links, self.trace = made.lane, made.links, trace
        self.told: list[Message] = []
        self._task = made.task

    def send(self, *keys: int, chunk: int = 1, run: int = 1) -> None:
        """A task of these samples, which are told one by one where that can be."""
        self.lane.send(self._task(keys, chunk, run)._replace(singly=True))

    def of(self, kind: type[_Kind]) -> list[_Kind]:
        """What of this kind it has told."""
        self.told += self.lane.receive()
        return [message for message in self.told if isinstance(message, kind)]

    def hears(self, kind: type[_Kind]) -> list[_Kind]:
        """The same, once there is any."""
        assert wait_until(lambda: self.of(kind)), f"the lane tells no {kind.__name__}"
        return self.of(kind)

    def reports(self, chunk: int = 1, run: int = 1) -> list[Report]:
        """Those of one task so far."""
        return [report for report in self.of(Report) if (report.run, report.chunk) == (run, chunk)]

    def done(self, chunk: int = 1, run: int = 1) -> int:
        """Wait until the task has ended; how many of its samples are reported, each once and in order."""
        assert wait_until(lambda: any(report.final for report in self.reports(chunk, run))), "no final report"
        reports = self.reports(chunk, run)
        assert [report.final for report in reports] == [False] * (len(reports) - 1) + [True]
        done = 0
        for report in reports:
            assert report.first == done
            done = report.done
        return done

    def waits(self, *, told: int = 0) -> None:
        """Until the gated sample is at work and, where that can be, so many before it are told."""
        assert wait_until(lambda: self.trace.begun(GATED)), "it is not begun"
        if self.lane.shows_progress:
            assert wait_until(lambda: self._looked() and sum(r.done - r.first for r in self.of(Report)) >= told)

    def _looked(self) -> bool:
        self.lane.look()
        return True

    def progress(self) -> tuple[AtWork, ...]:
        """What workers are at, as told from now on."""
        before = len(self.of(Progress))
        self.lane.look()
        assert wait_until(lambda: len(self.of(Progress)) > before), "it tells no progress"
        return self.of(Progress)[-1].at_work


@pytest.mark.usefixtures("no_leaks")
class LaneContract:
    """``name`` and ``kind`` of the lane under test; ``retiring``: what makes one that retires, where it can."""

    kind = CPU

    @contextmanager
    def made(self, trace: Trace) -> Iterator[Made]:
        """A lane of one worker, which can be replaced if such workers can be; somebody waits for what it tells."""
        raise NotImplementedError

    @contextmanager
    def retiring(self, trace: Trace) -> Iterator[Made]:
        """One that retires when it is to do what it is sent."""
        pytest.skip("no such lane retires")
        yield  # type: ignore[unreachable]

    @pytest.fixture
    def site(self) -> Iterator[Site]:
        trace = Trace()
        with self.made(trace) as made:
            try:
                yield Site(made, trace)
            finally:
                trace.gate.set()
                assert made.lane.close(20.0)
                trace.gate.close()

    # --- opening ---

    def test_it_says_what_it_is(self, site: Site) -> None:
        assert site.lane.kind == self.kind and site.lane.kind in (CPU, DEVICE)
        assert site.lane.name and site.lane.advice and site.lane.who(0)
        assert site.hears(Opened) == [Opened(site.lane.slots)]
        site.send(1)
        assert site.done() == 1
        assert site.of(Opened) == [Opened(site.lane.slots)], "told once"

    def test_what_has_nothing_to_tell_wakes_nobody(self, site: Site) -> None:
        site.hears(Opened)
        site.send(1, 2)
        site.done()
        assert wait_until(lambda: not (site.lane.receive() or self._is_woken(site)))

    @staticmethod
    def _is_woken(site: Site) -> bool:
        """Whether the consumer has been woken since it last was asked."""
        bell = site.links.consumer_wake
        ready, _, _ = select.select([bell, *site.lane.fault_fds()], [], [], 0)
        if bell in ready:
            os.eventfd_read(bell)
        return bool(ready)

    # --- work ---

    def test_each_sample_is_reported_once_and_in_order(self, site: Site) -> None:
        for chunk in range(1, 9):
            site.send(*range(10 * chunk, 10 * chunk + chunk), chunk=chunk)
        assert [site.done(chunk) for chunk in range(1, 9)] == list(range(1, 9))
        keys = [key for chunk in range(1, 9) for key in range(10 * chunk, 10 * chunk + chunk)]
        assert all(site.trace.begun(key) == 1 for key in keys)

    def test_reports_wake_whoever_waits(self, site: Site) -> None:
        site.hears(Opened)
        for chunk in (1, 2):
            self._is_woken(site)  # for what came before
            site.send(chunk, chunk=chunk)
            assert wait_until(lambda: self._is_woken(site)), "nobody is woken"
            assert site.done(chunk) == 1

    def test_what_is_at_work_is_told(self, site: Site) -> None:
        before = perf_counter()
        site.send(1, 2, GATED, 7)
        site.waits(told=2)
        [at] = site.progress()
        assert at.claim[:2] == (1, 1) and before <= at.since <= perf_counter() and at.together >= 1
        if site.lane.shows_progress:
            assert at.claim.started == 3 and site.reports()[-1].done == 2
        site.trace.gate.set()
        assert site.done() == 4
        assert all(before <= report.begin <= report.end <= perf_counter() for report in site.reports())
        assert wait_until(lambda: not site.progress())

    def test_some_tasks_alone_can_be_asked_for(self, site: Site) -> None:
        site.send(1, 2, GATED)

        def asked() -> bool:
            site.told += site.lane.receive([(1, 1)])
            return sum(report.done - report.first for report in site.told if isinstance(report, Report)) == 2

        if site.lane.shows_progress:
            assert wait_until(asked), "what is finished is not told before the task has ended"
        site.lane.receive([(1, 99), (7, 1)])
        site.trace.gate.set()
        assert site.done() == 3

    def test_no_sample_is_started_that_was_revoked(self, site: Site) -> None:
        site.send(1, GATED, 7, 8, 9)
        site.waits()
        site.lane.revoke(1, 1, 3)
        site.lane.revoke(1, 1, 2)
        if site.lane.shows_progress:
            assert wait_until(lambda: len(site.of(KeptSamples)) == 2), "the answer does not come"
        site.trace.gate.set()
        done, keeps = site.done(), [revoked.keep for revoked in site.of(KeptSamples)]
        if site.lane.shows_progress:
            assert keeps == [3, 2]
        kept = min(keeps, default=5)
        assert done == kept >= 2
        assert [site.trace.begun(key) for key in (1, GATED, 7, 8, 9)] == [1] * kept + [0] * (5 - kept)
        last = max(at for at, message in enumerate(site.told) if isinstance(message, Report))
        assert not any(isinstance(message, KeptSamples) for message in site.told[last:])

    def test_a_sample_at_work_stays(self, site: Site) -> None:
        site.send(1, GATED, 7)
        site.waits()
        site.lane.revoke(1, 1, 0)
        site.trace.gate.set()
        assert site.done() == min((revoked.keep for revoked in site.of(KeptSamples)), default=3) >= 2

    def test_a_revocation_that_comes_too_late_changes_nothing(self, site: Site) -> None:
        site.send(1, 2)
        assert site.done() == 2
        site.lane.revoke(1, 1, 0)
        site.lane.hand_over(1, 1, (1,))
        site.send(3, 4, chunk=2)
        assert site.done(2) == 2 and site.of(KeptSamples) == []

    def test_tasks_that_have_not_begun_are_recalled(self, site: Site) -> None:
        site.send(GATED, 6)
        site.waits()
        for chunk in range(2, 7):
            site.send(10 * chunk, chunk=chunk)
        site.lane.recall()
        site.lane.recall()
        [recalled] = site.hears(Recalled)
        assert sorted(recalled.tasks) == [(1, chunk) for chunk in range(2, 7)]
        site.trace.gate.set()
        assert site.done() == 2
        site.send(70, chunk=7)
        assert site.done(7) == 1
        assert {report.chunk for report in site.of(Report)} == {1, 7}
        assert not any(site.trace.begun(10 * chunk) for chunk in range(2, 7))

    def test_runs_that_were_given_up_are_told_apart(self, site: Site) -> None:
        """Their tasks have the same numbers."""
        site.send(1, GATED, 7)
        site.waits()
        site.send(8, 9, run=2)
        site.lane.revoke(2, 1, 0)
        site.trace.gate.set()
        assert site.done(run=1) == 3
        site.done(run=2)  # an agent may hear of it when it has begun
        assert all((kept.run, kept.keep) == (2, 2) for kept in site.of(KeptSamples))

    # --- faults ---

    def test_a_worker_that_is_killed_is_told_and_replaced(self, site: Site) -> None:
        if not site.lane.can_kill:
            pytest.skip("no such worker can be killed")
        site.hears(Opened)
        site.send(1, 2, GATED, 7)
        site.waits(told=2)
        site.lane.kill(0, "it hung")
        assert wait_until(lambda: self._is_woken(site))
        [ended] = site.hears(Exit)
        assert ended.claim[:3] == (1, 1, 3) and ended.hung == ended.message() == "it hung"
        assert site.reports()[-1].done == 2 and isinstance(site.told[-1], Exit), "after all that it had told"
        assert site.progress() == ()
        site.lane.replace(0, ())
        assert wait_until(lambda: len(site.of(Opened)) == 2), "no replacement comes"
        assert site.of(Opened) == [Opened(1), Opened(1)] and len(site.of(Exit)) == 1
        site.send(8, 9, chunk=2)
        assert site.done(2) == 2 and site.reports()[-1].done == 2
        assert site.trace.begun(7) == 0

    def test_one_that_is_taken_to_hang_is_described(self, site: Site) -> None:
        site.send(GATED)
        site.waits()
        assert "wait" in site.lane.stack_of_hung(0) or "contract.py" in site.lane.stack_of_hung(0)
        assert "contract.py" in site.lane.stacks_at_work()

    def test_a_lane_that_retires_gives_back_its_tasks(self) -> None:
        trace = Trace()
        with self.retiring(trace) as made:
            site = Site(made, trace)
            site.send(1)
            site.hears(Retired)
            site.send(2, 3, chunk=2)
            site.done()
            assert site.done(2) == 0
            assert len(site.of(Retired)) == 1 and not trace.begun(2)
            assert made.lane.close(20.0)
            trace.gate.close()

    # --- messages, and the end ---

    def test_messages_can_travel(self, site: Site) -> None:
        site.send(GATED)
        site.waits()
        site.send(1, chunk=2)
        site.lane.recall()
        site.lane.revoke(1, 1, 0)
        site.progress()
        site.trace.gate.set()
        site.done()
        found = [message for message in site.told if not isinstance(message, Report)]
        assert {Opened, Recalled, Progress} <= {type(message) for message in found}
        assert [pickle.loads(pickle.dumps(message)) for message in found] == found

    def test_closing_twice_with_tasks_waiting(self, site: Site) -> None:
        for chunk in range(1, 40):
            site.send(chunk + 10, chunk=chunk)
        assert site.lane.close(20.0) and site.lane.close(20.0)
        site.lane.receive()

    def test_closing_what_was_never_used(self, site: Site) -> None:
        assert site.lane.close(20.0)
