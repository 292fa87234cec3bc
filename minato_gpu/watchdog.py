"""Workers that hang: at one sample, or one batch to be joined, for longer than a limit.

A worker is found to hang when it was too long at something twice, a moment apart: a worker that could not report
because nobody read its reports is not taken for one that hangs. Its stack is asked for before anything is done.
"""

from __future__ import annotations

from typing import Any

from minato_gpu.memory.board import Claim

_TWICE_S = 0.05


class WorkerHung(RuntimeError):
    """A worker has been at one sample for longer than ``hang_timeout``, and is not replaced."""


class Watchdog:
    """Watches the CPU lane. ``limit``: seconds."""

    def __init__(self, lane: Any, limit: float) -> None:
        self._lane = lane
        self._limit = limit
        self._suspects: dict[int, float] = {}  # since when they have been at what they are at
        self._again: float | None = None

    def next_look(self, now: float) -> float:
        """When to look next, were nothing to happen until then."""
        if self._again is not None:
            return self._again
        return min((since for since, _ in self._lane.at_work().values()), default=now) + self._limit

    def look(self, now: float) -> list[tuple[int, Claim]]:
        """The workers that hang, and what each is at."""
        overdue = {n: at for n, at in self._lane.at_work().items() if now - at[0] > self._limit}
        hung = [(n, claim) for n, (since, claim) in overdue.items() if self._suspects.get(n) == since]
        self._suspects = {n: since for n, (since, _) in overdue.items()}
        self._again = now + _TWICE_S if len(hung) < len(overdue) else None
        if hung and self._again is None:
            self._again = now + self._limit  # they are dealt with; one that cannot be ended is told of once in a while
        return hung

    def words(self, lane: Any, worker: int, what: str) -> str:
        """What is to be said of a worker that hangs."""
        return (
            f"DataLoader worker {worker} (pid {lane.pids[worker]}) has hung: it has been at {what} for longer than "
            f"hang_timeout={self._limit:g} s.{lane.stuck_at(worker)}\n"
        )
