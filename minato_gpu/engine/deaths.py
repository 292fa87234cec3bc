"""Decides what happens to the work of a worker that has died: others do it, unless it has killed two workers.

The sample that it was at is taken to be the cause once two workers have died at it (``MOST``): from then on it is a bad
sample, and ``on_error`` decides. So is a batch that two workers have died joining. A worker that hung and was killed
counts as dead. What ended the second one is reported: the exception that it raised, that it hung, or ``KilledWorkers``.
Of ``__getitems__``, and of a report of several samples, it is not known which one killed: those it was about come one
by one the next time. A job that prepares its samples itself blames the one that it was at.

Nobody is blamed where the worker was at nothing; but where ``STARTS`` workers in a row end before they have taken any
work, each in the place of the one before, or ``LOOPS`` with the same task before they have begun a sample of it, every
further one would too, and that is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import NamedTuple

from minato_gpu.faults.watchdog import WorkerHung
from minato_gpu.lanes.base import Failure, Item, failure
from minato_gpu.lanes.contract import Exit
from minato_gpu.lanes.processes import KilledWorkers, WorkerDied
from minato_gpu.memory.status_board import FETCHING, JOINING, REPORTING, Claim
from minato_gpu.samples import TicketId
from minato_gpu.scheduling.spans import Span, TicketSpan, cut, number_at, tickets
from minato_gpu.window.assembly import Assembly

MOST = 2
STARTS = 3
LOOPS = 5


class Verdict(NamedTuple):
    """The samples of a dead worker's chunk that are given up."""

    settled: Span  # offsets in the chunk that are given up
    items: list[Item]  # what their tickets get instead of a sample

    @property
    def failure(self) -> Failure | None:
        """The first failure among the items; None if there is none."""
        return next((item for item in self.items if isinstance(item, Failure)), None)


class Deaths:
    """The deaths of workers in one run of a loader. ``stages``: names of the pipeline's stages."""

    def __init__(self, stages: tuple[str, ...] = ()) -> None:
        self._stages = stages
        self._at: Counter[Hashable] = Counter()
        self._singly: set[TicketId] = set()
        self._failed_starts: Counter[tuple[str, int]] = Counter()  # failed starts in a row, by lane and worker

    def begin_run(self) -> None:
        """Forgets the tickets of the last run, as numbers begin anew."""
        self._at.clear()
        self._singly.clear()

    def check_start(self, lane: str, exit_: Exit) -> None:
        """Counts the workers in a row that ended, in this one's place, before taking a task; raises WorkerDied for the
        last of ``STARTS``."""
        number = lane, exit_.number
        self._failed_starts[number] = 0 if exit_.claim.chunk >= 0 else self._failed_starts[number] + 1
        if self._failed_starts[number] >= STARTS:
            raise WorkerDied(f"{_died(exit_)} {STARTS} workers in a row ended before they had taken any work")

    def singly(self, spans: tuple[TicketSpan, ...]) -> bool:
        """Returns whether samples among these should be asked for one by one, as a worker has died at one of them."""
        return bool(self._singly) and not self._singly.isdisjoint(tickets(spans))

    def stage(self, claim: Claim) -> str | None:
        """Returns what a worker was at: a stage's name, "collate" while it joined a batch, "send" while it reported.

        None if it was at the data set, or at nothing.
        """
        if claim.stage in (JOINING, REPORTING):
            return "collate" if claim.stage == JOINING else "send"
        return self._stages[claim.stage - 1] if 0 < claim.stage <= len(self._stages) else None

    def judge(
        self,
        exit_: Exit,
        lane: str,
        spans: tuple[TicketSpan, ...],
        done: int,
        stop: int,
        assembly: Assembly,
        *,
        job: bool = False,
    ) -> Verdict:
        """Notes what a worker has died at, and decides which samples of its task are given up; the others are to be
        prepared again.

        ``spans`` are the task's samples, of which those from offset ``done`` to ``stop`` are not reported. ``job``: the
        task joins them to a batch. Raises WorkerDied for the last of ``LOOPS`` workers that died at none of them.
        """
        nothing, claim = Verdict((0, 0), []), exit_.claim
        reporting = claim.stage == REPORTING
        at = (min(claim.started, stop) if reporting else claim.started) - 1
        if not done <= at < stop:
            if left := cut(spans, done, stop):
                self._at["none of", left[0][0]] += 1
                if self._at["none of", left[0][0]] >= LOOPS:
                    what = f"{LOOPS} workers have died with one task, and at none of its samples"
                    raise WorkerDied(f"{_died(exit_)} {what}")
            return nothing
        serial = number_at(spans, at)
        if claim.stage == JOINING or (job and reporting):
            first = 0 if job else at - (serial - assembly.window.at(serial).first)
            serial = number_at(spans, first)
            if not self._again(("batch", serial)):
                return nothing
            batch = self._failure(exit_, lane, serial, assembly, collated=True)
            return Verdict((first, at + 1), [batch, *[None] * (at - first)])
        if claim.stage == FETCHING or (reporting and at > done):
            together = cut(spans, at if claim.stage == FETCHING else done, stop)
            known = reporting and self.singly(together)  # and all the same reported together: a batch, or host reads
            self._singly.update(tickets(together))
            if not known:
                return nothing
        if not self._again(serial):
            return nothing
        return Verdict((at, at + 1), [self._failure(exit_, lane, serial, assembly)])

    def _again(self, what: Hashable) -> bool:
        self._at[what] += 1
        return self._at[what] >= MOST

    def _failure(
        self, exit_: Exit, lane: str, serial: TicketId, assembly: Assembly, *, collated: bool = False
    ) -> Failure:
        origin = assembly.samples.origin(serial, self.stage(exit_.claim), lane)
        kind, died = (WorkerHung, "hung or died") if exit_.hung else (KilledWorkers, "died")
        error = kind(f"{_died(exit_)}\n{MOST} workers have {died} at this ({origin}).")
        where = f"in DataLoader worker process {exit_.number} ({origin})"
        return failure(error, where, collated=collated, origin=origin, name=exit_.error)


def _died(exit_: Exit) -> str:
    return exit_.message().rstrip()
