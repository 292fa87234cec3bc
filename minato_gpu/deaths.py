"""What is done about a worker that has died: others do what it had taken, unless that has killed before.

The sample that it was at is taken to be the cause once two workers have died at it (``MOST``): from then on it is a bad
sample, and ``on_error`` decides. So is a batch that two workers have died joining. A worker that hung and was killed
counts as dead. Of ``__getitems__`` it is not known at which sample it died: those it was asked for come one by one the
next time. Nobody is blamed where the worker was at nothing; but where ``STARTS`` workers in a row end before they have
taken any work, each in the place of the one before, every further one would too, and that is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any, NamedTuple

from minato_gpu.assembly import Assembly
from minato_gpu.lanes.base import Failure, Task, failure
from minato_gpu.lanes.processes import Exit, WorkerDied
from minato_gpu.memory.board import FETCHING, JOINING, Claim
from minato_gpu.samples import Origin
from minato_gpu.scheduling.flights import cut
from minato_gpu.scheduling.messages import Chunk, Span

MOST = 2
STARTS = 3


class Verdict(NamedTuple):
    """Offsets ``settled`` of the chunk are given up; ``items``: what their tickets get instead of a sample."""

    settled: Span
    items: list[Any]


class Deaths:
    """The deaths of one loader run. ``stages``: names of the pipeline's stages."""

    def __init__(self, stages: tuple[str, ...] = ()) -> None:
        self._stages = stages
        self._at: Counter[Hashable] = Counter()
        self._singly: set[int] = set()
        self._unborn: Counter[int] = Counter()

    def begin_run(self) -> None:
        """Tickets are numbered anew."""
        self._at.clear()
        self._singly.clear()

    def check_start(self, exit_: Exit, claim: Claim) -> None:
        """Raises WorkerDied where no worker gets as far as taking a task."""
        number = exit_.number
        self._unborn[number] = 0 if claim.chunk >= 0 else self._unborn[number] + 1
        if self._unborn[number] >= STARTS:
            raise WorkerDied(f"{exit_.message()}{STARTS} workers in a row ended before they had taken any work")

    def singly(self, spans: tuple[Span, ...]) -> bool:
        """Whether samples among these should be asked for one by one."""
        return bool(self._singly) and any(serial in self._singly for lo, hi in spans for serial in range(lo, hi))

    def stage(self, claim: Claim) -> str | None:
        """The name of what a worker was at."""
        if claim.stage == JOINING:
            return "collate"
        return self._stages[claim.stage - 1] if 0 < claim.stage <= len(self._stages) else None

    def judge(self, exit_: Exit, claim: Claim, chunk: Chunk, done: int, stop: int, assembly: Assembly) -> Verdict:
        """The chunk's samples from ``done`` to ``stop`` are not reported: which of them are given up?"""
        nothing = Verdict((0, 0), [])
        at = claim.started - 1
        if not done <= at < stop:
            return nothing
        serial = cut(chunk.spans, at, at + 1)[0][0]
        record = assembly.record(serial)
        if claim.stage == FETCHING:
            self._singly.update(s for lo, hi in cut(chunk.spans, at, stop) for s in range(lo, hi))
            return nothing
        if claim.stage == JOINING:
            first = at - (serial - record.first)
            if not self._again(("batch", record.first)):
                return nothing
            origin = Origin(record.epoch, record.positions[0], record.keys[0], "collate", "cpu")
            return Verdict((first, at + 1), [self._failure(exit_, origin, True), *[None] * (at - first)])
        if not self._again(serial):
            return nothing
        return Verdict((at, at + 1), [self._of_sample(exit_, claim, serial, assembly)])

    def judge_job(self, exit_: Exit, claim: Claim, spans: tuple[Span, ...], assembly: Assembly) -> Failure | None:
        """What the batch gets instead of being joined, or None: it is to be tried again."""
        if claim.chunk < 0 or not (claim.started or claim.stage) or not self._again(("batch", spans[0][0])):
            return None
        at = max(0, claim.started - 1) if claim.stage != JOINING else 0
        serial = cut(spans, at, at + 1)[0][0]
        return self._of_sample(exit_, claim, serial, assembly, collated=True)

    def judge_pad(self, exit_: Exit, claim: Claim, pad: Task) -> Failure | None:
        """The same for a batch of one sample that is repeated."""
        piece = pad.pieces[0]
        if claim.chunk < 0 or not self._again(("pad", piece.position_of(0))):
            return None
        origin = Origin(pad.epoch, piece.position_of(0), piece.keys[0], self.stage(claim), "cpu")
        return self._failure(exit_, origin, True)

    def _again(self, what: Hashable) -> bool:
        self._at[what] += 1
        return self._at[what] >= MOST

    def _of_sample(
        self, exit_: Exit, claim: Claim, serial: int, assembly: Assembly, *, collated: bool = False
    ) -> Failure:
        record = assembly.record(serial)
        at = serial - record.first
        origin = Origin(record.epoch, record.positions[at], record.keys[at], self.stage(claim), "cpu")
        return self._failure(exit_, origin, collated)

    def _failure(self, exit_: Exit, origin: Origin, collated: bool) -> Failure:
        error = WorkerDied(f"{exit_.message().rstrip()}\n{MOST} workers have died at this ({origin}).")
        where = f"in DataLoader worker process {exit_.number} ({origin})"
        return failure(error, where, collated=collated, origin=origin)
