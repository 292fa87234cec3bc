"""Room for new copies: those that no run has used since it began go, the longest unused first.

What goes at a time is a 64th of the budget, as each time all copies are looked at. One process evicts at a time; others
that need room just then are refused.
"""

from __future__ import annotations

import heapq
import math

from minato_gpu.sources.disk.account import Account
from minato_gpu.sources.disk.directory import Directory
from minato_gpu.sources.disk.runs import CacheRun, RunRecord, find_runs, unused_before

_MOST = 1 << 16  # copies that go at a time


class Eviction:
    """Makes room for a ``run``, which may fill ``room`` bytes. For one thread. Methods raise OSError."""

    def __init__(self, directory: Directory, account: Account, run: CacheRun, room: int) -> None:
        self._directory, self._account, self._run, self._room = directory, account, run, room

    def others(self) -> list[RunRecord]:
        """Returns the other runs, which may want copies."""
        return find_runs(self._directory.root.fd, self._run.name)[0]

    def make_room(self, nbytes: int) -> int:
        """Evicts for at least so many bytes, and a 64th of the budget, if as many may go; returns how many copies
        went."""
        with self._directory.evicting() as mine:
            excess = self._account.look().nbytes - self._room
            return self._evict(max(nbytes, self._room >> 6) + excess, self._unused_before()) if mine else 0

    def trim(self) -> int:
        """Evicts what is more than this run's budget, in use or not, unless a run is in its first epoch."""
        if not self._run.record.has_read or self._account.look().nbytes <= self._room:
            return 0
        with self._directory.evicting() as mine:
            if not mine or not self._unused_before():
                return 0
            return self._evict(self._account.look().nbytes - self._room, math.inf)

    def _unused_before(self) -> float:
        return unused_before([self._run.record, *self.others()])

    def _evict(self, nbytes: int, before: float) -> int:
        """Removes the copies that are used the longest ago, of those last used ``before``; counts everything anew, as
        all of it is looked at. Returns how many went."""
        if not before:
            return 0
        with self._account.change() as totals:
            old = ((each.used_at, each) for each in self._account.count_each(totals) if each.used_at < before)
            oldest = heapq.nsmallest(_MOST, old)
        names = []
        for _, each in oldest:
            if nbytes <= 0:
                break
            names.append(each.name)
            nbytes -= each.nbytes
        return self._account.remove(names, before).copies
