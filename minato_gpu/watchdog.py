"""Workers that hang: at one sample, or one batch to be joined, for longer than a limit.

A worker is found to hang when it was too long at something twice, a moment apart: a worker that could not report
because nobody read its reports is not taken for one that hangs. Its stack is asked for before anything is done.

A job that is stopped for a while (Ctrl-Z and fg, a virtual machine that is moved) stops its workers too, but not the
clock. So the watchdog looks a few times within the limit, and where it comes to look much later than it was due, what
workers are at counts from then.
"""

from __future__ import annotations

from typing import Any

from minato_gpu.memory.board import Claim

_TWICE_S = 0.05
_LOOKS = 4  # within the limit
_LATE_S = 0.25  # a busy machine delays a look by less


class WorkerHung(RuntimeError):
    """A worker has been at one sample for longer than ``hang_timeout``, and is not replaced."""


class Watchdog:
    """Watches the CPU lane. ``limit``: seconds."""

    def __init__(self, lane: Any, limit: float) -> None:
        self._lane = lane
        self._limit = limit
        self._pause = limit / _LOOKS
        self._suspects: dict[int, float] = {}  # since when they have been at what they are at
        self._due: float | None = None  # when to look
        self._awake = 0.0  # since when this process has not been stopped

    def next_look(self, now: float) -> float:
        """When to look next, were nothing to happen until then."""
        if self._due is None:
            self._due = now + self._pause
        return self._due

    def look(self, now: float) -> list[tuple[int, Claim]]:
        """The workers that hang, and what each is at."""
        if now - self.next_look(now) > max(self._pause, _LATE_S):
            self._awake = now
        at_work = {n: (max(since, self._awake), claim) for n, (since, claim) in self._lane.at_work().items()}
        overdue = {n: at for n, at in at_work.items() if now - at[0] >= self._limit}
        hung = [(n, claim) for n, (since, claim) in overdue.items() if self._suspects.get(n) == since]
        self._suspects = {n: since for n, (since, _) in overdue.items()}
        if len(hung) < len(overdue):
            self._due = now + _TWICE_S
        elif hung:
            self._due = now + self._limit  # they are dealt with; one that cannot be ended is told of once in a while
        else:
            first = min((since for since, _ in at_work.values()), default=now) + self._limit
            self._due = min(now + self._pause, max(now, first))
        return hung

    def words(self, lane: Any, worker: int, what: str) -> str:
        """What is to be said of a worker that hangs."""
        return (
            f"DataLoader worker {worker} (pid {lane.pids[worker]}) has hung: it has been at {what} for longer than "
            f"hang_timeout={self._limit:g} s.{lane.stuck_at(worker)}\n"
        )
