"""Workers that hang, and device lanes: at one sample, or one batch to be joined, for longer than a limit.

A worker is found to hang when it was too long at something twice, a moment apart: a worker that could not report
because nobody read its reports is not taken for one that hangs. Its stack is asked for before anything is done. Where a
graph runs several samples together (DALI's), so many times the limit is what they may take.

A job that is stopped for a while (Ctrl-Z and fg, a virtual machine that is moved) stops its workers too, but not the
clock. So the watchdog looks a few times within the limit, and where it comes to look much later than it was due, what
workers are at counts from then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from minato_gpu.lanes.contract import AtWork, Lane
from minato_gpu.memory.status_board import Claim

_TWICE_S = 0.05
_LOOKS = 4  # within the limit
_LATE_S = 0.25  # a busy machine delays a look by less


class WorkerHung(RuntimeError):
    """A worker, or the device lane, has been at one sample for longer than ``hang_timeout``, and is not replaced; or it
    was, and the next worker died at the sample or hung there too."""


class Hung(NamedTuple):
    """What hangs: worker ``worker`` of lane ``lane`` (the device lane has one), and what it is at."""

    lane: str
    worker: int
    claim: Claim


class Watchdog:
    """Watches the lanes, by name. ``limit``: seconds."""

    def __init__(self, lanes: Mapping[str, Lane], limit: float) -> None:
        self._lanes = lanes
        self._limit = limit
        self._pause = limit / _LOOKS
        self._suspects: dict[tuple[str, int], float] = {}  # since when they have been at what they are at
        self._due: float | None = None  # when to look
        self._awake = 0.0  # since when this process has not been stopped

    def next_look(self, now: float) -> float:
        """When to look next, were nothing to happen until then."""
        if self._due is None:
            self._due = now + self._pause
        return self._due

    def look(self, now: float, told: Mapping[str, Sequence[AtWork]]) -> list[Hung]:
        """The workers that hang. ``told``: what the workers of each lane are at, as the lanes have just said.

        A worker hangs if it was over the limit in the look before, too, at the same sample. When to look next: soon
        where one is over the limit for the first time, else when the first one may come over it.
        """
        if now - self.next_look(now) > max(self._pause, _LATE_S):
            self._awake = now
        starts, overdue, hung = [], {}, []
        for name, at_work in told.items():
            for each in at_work:
                since = max(each.since, self._awake)
                starts.append(since)
                if now - since >= self._limit * each.together:
                    overdue[name, each.worker] = since
                    if self._suspects.get((name, each.worker)) == since:
                        hung.append(Hung(name, each.worker, each.claim))
        self._suspects = overdue
        if len(hung) < len(overdue):
            self._due = now + _TWICE_S
        elif hung:
            self._due = now + self._limit  # they are killed; a thread cannot be, and is told of again
        else:
            ends = [since + self._limit for since in starts if since + self._limit > now]
            self._due = min([now + self._pause, *ends])
        return hung

    def words(self, hung: Hung, what: str) -> str:
        """What is to be said of it."""
        lane = self._lanes[hung.lane]
        return (
            f"DataLoader {lane.who(hung.worker)} has hung: it has been at {what} for longer than "
            f"hang_timeout={self._limit:g} s.{lane.stuck_at(hung.worker)}\n"
        )
