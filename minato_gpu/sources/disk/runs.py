"""Who reads by the tier, and so which copies nobody does: what is decided from that is pure.

A *run* is a loader in a process. It stays a run between its epochs, as long as its process lives, though the process
that reads for it may be started anew for each. What it has used since it began is of use to it. After a day that is
too much to ask: then what it has used neither in the last day nor since the beginning of its last whole epoch is not.
While its first epoch goes on, any copy may be what it reads next.

A run that is not heard of for a quarter of an hour reads nothing (it may have been a single pass), and holds on to what
it has used; after a day, to nothing. That is also how runs end whose processes cannot be seen, as those of another
container.

Uses are written down within a minute, and one that follows another within the hour is not: so no read waits for a
write, and what is read in every epoch costs a record an hour.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from minato_gpu.caching.orders import Part
from minato_gpu.sources.disk.index import Index
from minato_gpu.sources.disk.records import Run

_COARSE_S, _DAY_S = 3600.0, 86400.0
_READS_NOTHING_S = 900.0


class Runs:
    """The runs in ``index``, of which one is this process's: ``name``, of process ``pid``, with ``budget`` bytes.

    Methods raise lmdb.Error and DamagedIndexError. ``now``: seconds since 1970.
    """

    def __init__(self, index: Index, name: str, pid: int, budget: int) -> None:
        self.budget = budget
        self._index = index
        self._key = f"{name} {pid}".encode()
        self._new = Run(self._key, _namespace(), pid, _born(pid) or 0, 0.0, 0.0, 0.0, 0.0, budget)
        self._run = self._new

    @property
    def has_read(self) -> bool:
        """Whether its first epoch has ended."""
        return self._run.since > 0

    def begin(self, now: float, part: Part | None = None) -> None:
        """The run begins an epoch, after which what earlier epochs have not used is of no use to it. ``part``: what it
        reads, for ``beside`` of others."""
        with self._index.write() as transaction:
            mine = self._index.runs.get(transaction, self._key) or self._new
            self._run = begun(mine._replace(budget=self.budget, part=part), now)
            for run in list(self._index.runs.items(transaction)):
                if run.key != self._key and not _needs_copies(run, now):
                    self._index.runs.pop(transaction, run.key)
            self._index.runs.put(transaction, self._run)

    def heard(self, now: float) -> None:
        """The run has been reading."""
        if not self._run.began:
            return
        with self._index.write() as transaction:
            found = self._index.runs.get(transaction, self._key) or self._run
            self._run = found._replace(heard=now)
            self._index.runs.put(transaction, self._run)

    def beside(self, now: float) -> list[Part | None]:
        """What each of the other runs reads that need copies; None for one that does not say."""
        with self._index.read() as transaction:
            others = [run for run in self._index.runs.items(transaction) if run.key != self._key]
        return [run.part for run in others if _needs_copies(run, now)]

    def is_old(self, used_at: float, now: float) -> bool:
        """Whether a use is to be written down, of a copy whose last one was then."""
        return used_at < max(self._run.began, now - _COARSE_S)

    def limits(self, now: float) -> tuple[float, int]:
        """Copies that have not been used since the first are of no use to anybody; the second is the largest budget.

        The first is 0 until this run's first epoch has ended.
        """
        with self._index.read() as transaction:
            found = list(self._index.runs.items(transaction))
        runs = [self._run._replace(heard=now), *(run for run in found if _lives(run))]
        return unused_before(runs, now), max(run.budget for run in runs if needs_from(run, now) < math.inf)


def begun(run: Run, now: float) -> Run:
    """The run as it begins an epoch."""
    if not run.epoch_at:
        return run._replace(began=now, epoch_at=now, heard=now)
    since = max(run.began, min(run.epoch_at, now - _DAY_S) - _COARSE_S)
    return run._replace(epoch_at=now, since=since, heard=now)


def needs_from(run: Run, now: float) -> float:
    """Copies that have been used since then are of use to the run; infinite where it needs none."""
    if now - run.heard > _DAY_S:
        return math.inf
    return run.began if not run.since and now - run.heard > _READS_NOTHING_S else run.since


def unused_before(runs: Iterable[Run], now: float) -> float:
    """Copies that have not been used since then are of no use to any of the runs."""
    return min(needs_from(run, now) for run in runs)


def _needs_copies(run: Run, now: float) -> bool:
    return _lives(run) and needs_from(run, now) < math.inf


def _lives(run: Run) -> bool:
    return run.namespace != _namespace() or _born(run.pid) == run.born


def _namespace() -> int:
    """Of process ids: those of other containers mean nothing here."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def _born(pid: int) -> int | None:
    """When the process was started, in clock ticks since the machine was: ids are used again. None where it has
    ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in b"ZX" else int(fields[19])
