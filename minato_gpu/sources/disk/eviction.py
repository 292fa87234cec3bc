"""Room for new copies: those that no run has used since it began go, the longest unused first.

Never more goes than is to be written, about, so that nothing changes once the budget is full of what is read now. One
process evicts at a time; others that need room just then are refused.
"""

from __future__ import annotations

import heapq
import math
import time

from minato_gpu.sources.disk.account import AT_A_TIME, Account
from minato_gpu.sources.disk.directory import Directory
from minato_gpu.sources.disk.runs import CacheRun, RunRecord, find_runs, is_idle, unused_before

_AT_ONCE = 8 << 20  # bytes of room that are made together, at least
_LISTED = 1 << 16  # copies that are found by one scan, at most


class Eviction:
    """Makes room for a ``run``, which may fill ``room`` bytes. For one thread. Methods raise OSError."""

    def __init__(self, directory: Directory, account: Account, run: CacheRun, room: int) -> None:
        self._directory, self._account, self._run, self._room = directory, account, run, room
        self._listed: list[tuple[str, int]] = []  # what may go, with its bytes, the first last
        self._before = 0.0  # of those that have been used since nothing is listed
        self._is_whole = False  # whether nothing else may go

    def others(self) -> list[RunRecord]:
        """Returns the other runs that may want copies."""
        now = time.time()
        return [each for each in find_runs(self._directory.root.fd, self._run.name)[0] if not is_idle(each, now)]

    def make_room(self, nbytes: int) -> int:
        """Evicts for at least so many bytes, if as many may go; returns how many copies went."""
        with self._directory.evicting() as mine:
            if not mine:
                return 0
            excess = self._account.look().nbytes - self._room
            before = unused_before([self._run.record, *self.others()], time.time())
            return self._evict(max(nbytes + excess, min(_AT_ONCE, self._room >> 6)), before)

    def trim(self) -> int:
        """Evicts what is more than this run's budget, in use or not, unless a run is in its first epoch."""
        if not self._run.record.has_read or self._account.look().nbytes <= self._room:
            return 0
        with self._directory.evicting() as mine:
            if not mine or not unused_before([self._run.record, *self.others()], time.time()):
                return 0
            gone = self._evict(self._account.look().nbytes - self._room, math.inf)
            self._before = 0.0  # what is left may be of use, and is listed again
            return gone

    def _evict(self, nbytes: int, before: float) -> int:
        gone = 0
        if before != self._before or (not self._listed and not self._is_whole):
            self._list(before)
        while nbytes > 0 and self._listed:
            names: list[str] = []
            wanted = nbytes
            while wanted > 0 and self._listed and len(names) < AT_A_TIME:
                name, size = self._listed.pop()
                names.append(name)
                wanted -= size
            went = self._account.remove(names, before)
            nbytes, gone = nbytes - went.nbytes, gone + went.copies
        return gone

    def _list(self, before: float) -> None:
        """Finds what may go, and counts everything anew, as all of it is looked at."""
        self._listed, self._before, self._is_whole = [], before, True
        if not before:
            return
        with self._account.change() as totals:
            entries = self._account.count_each(totals)
            old = ((each.used_at, each.name, each.nbytes) for each in entries if each.used_at < before)
            found = heapq.nsmallest(_LISTED, old)
        self._listed, self._is_whole = [each[1:] for each in reversed(found)], len(found) < _LISTED
