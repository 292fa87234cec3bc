"""Notices workers and device lanes that hang: at one sample, or at joining one batch, for longer than a limit.

Being over the limit once does not prove it: a worker also stands still while nobody reads its reports. So it is looked
at again 50 ms later, when its reports have been read, and hangs if it is still at the same sample. Before it is killed
it is asked for its stack. A DALI graph runs the samples of a micro-batch together: 16 of them may take 16 times the
limit.

Ctrl-Z, or moving a virtual machine, stops the workers but not the clock: after a pause of an hour all of them would
seem to have hung. So the watchdog looks four times within the limit. With a limit of 60 s it is due every 15 s; where
it comes to look more than 15 s after it was due, the whole job has been stopped, and what each worker is at counts as
begun at that look.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from minato_gpu.lanes.contract import AtWork, Lane
from minato_gpu.memory.status_board import Claim

_CONFIRM_S = 0.05  # until a suspect is looked at again
_LOOKS = 4  # within the limit
_LATE_S = 0.25  # a busy machine delays a look by less


class WorkerHung(RuntimeError):
    """A worker, or the device lane, was at one sample for longer than ``hang_timeout``.

    It is not replaced; or it was, and the next worker died at the sample or hung there too.
    """


class Hung(NamedTuple):
    """A worker that hangs (the device lane has one), and what it is at."""

    lane: str
    worker: int
    claim: Claim


class Watchdog:
    """Watches the lanes, by name. ``limit`` is in seconds."""

    def __init__(self, lanes: Mapping[str, Lane], limit: float) -> None:
        self._lanes = lanes
        self._limit = float(limit)  # a sum of times with NumPy's float32 would be coarse
        self._pause = self._limit / _LOOKS
        # since when workers over the limit have been at their samples
        self._suspects: dict[tuple[str, int], float] = {}
        self._due: float | None = None  # when to look
        self._resumed = 0.0  # when this process was last found to have been stopped

    def next_look(self, now: float) -> float:
        """Returns when to look next if nothing happens until then, in seconds of the clock of ``now``."""
        if self._due is None:
            self._due = now + self._pause
        return self._due

    def look(self, now: float, told: Mapping[str, Sequence[AtWork]]) -> list[Hung]:
        """Returns the workers that hang: over the limit now and in the look before, at the same sample. The limit of a
        micro-batch is that of one sample, times its samples.

        ``told``: what the workers of each lane are at, as the lanes have just reported. Sets ``next_look``: in 50 ms if
        a worker is newly over the limit, else when the next one may be.
        """
        if now - self.next_look(now) > max(self._pause, _LATE_S):
            self._resumed = now
        starts, overdue, hung = [], {}, []
        for name, at_work in told.items():
            for each in at_work:
                since = max(each.since, self._resumed)
                starts.append(since)
                if now - since >= self._limit * each.together:
                    overdue[name, each.worker] = since
                    if self._suspects.get((name, each.worker)) == since:
                        hung.append(Hung(name, each.worker, each.claim))
        self._suspects = overdue
        if len(hung) < len(overdue):
            self._due = now + _CONFIRM_S
        elif hung:
            self._due = now + self._limit  # they are killed; a thread cannot be, and is reported again
        else:
            ends = [since + self._limit for since in starts if since + self._limit > now]
            self._due = min([now + self._pause, *ends])
        return hung

    def words(self, hung: Hung, what: str) -> str:
        """Returns the message about a worker that hangs, with its stack, for which it may wait some seconds. ``what``
        names the sample or batch that it is at."""
        lane = self._lanes[hung.lane]
        return (
            f"DataLoader {lane.who(hung.worker)} has hung: it has been at {what} for longer than "
            f"hang_timeout={self._limit:g} s.{lane.stack_of_hung(hung.worker)}\n"
        )
