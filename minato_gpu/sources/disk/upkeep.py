"""What a run does about copies of no use: it writes down which it uses, and makes room by removing those nobody does.

One process of all removes at a time, the *owner*; others that need room just then are refused. What is removed is what
has not been used for longest, and never more than is to be written, so nothing changes once the budget is full of what
is read now.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Sequence

from minato_gpu.caching.orders import Part
from minato_gpu.sources.disk.directory import Directory
from minato_gpu.sources.disk.files import SegmentFiles
from minato_gpu.sources.disk.freeing import free
from minato_gpu.sources.disk.index import Index
from minato_gpu.sources.disk.ledger import Ledger
from minato_gpu.sources.disk.records import Entry
from minato_gpu.sources.disk.runs import Runs

_AT_A_TIME = 64  # of each transaction
_AT_ONCE = 8 << 20  # bytes that are made free together, at least
_LISTED = 1 << 16  # copies that may go, as far as they are listed


class Upkeep:
    """Of the copies in ``index``, for one of the ``runs``. ``budget``: what copies and index may take, in bytes.

    ``used`` may be called by any thread, all else by one at a time; that raises OSError, lmdb.Error and
    DamagedIndexError.
    """

    def __init__(
        self, index: Index, ledger: Ledger, files: SegmentFiles, directory: Directory, runs: Runs, budget: int
    ) -> None:
        self._index, self._ledger, self._files, self._directory = index, ledger, files, directory
        self._runs, self._budget = runs, budget
        self._used: dict[bytes, None] = {}  # not written down yet
        self._listed: list[tuple[bytes, int]] = []  # what may go, with its bytes, the first last
        self._before = 0.0  # what that was listed for
        self._is_whole = False  # whether all were

    def used(self, entry: Entry) -> None:
        """A copy has been read."""
        if self._runs.is_old(entry.used_at, time.time()):
            self._used[entry.key] = None

    def begin(self, part: Part | None = None) -> int:
        """The run begins an epoch, of which it reads this part. With a budget below what there is, and no run with a
        larger one, copies go; returns how many."""
        self.tell()
        self._runs.begin(time.time(), part)
        with self._directory.owned() as owned:
            return self._trim() if owned else 0

    def tell(self) -> None:
        """Write down what has been used, and that this run goes on."""
        used = sorted([self._used.popitem()[0] for _ in range(len(self._used))])
        now = time.time()
        for at in range(0, len(used), _AT_A_TIME):
            self._ledger.used(used[at : at + _AT_A_TIME], now)
        self._runs.heard(now)

    def beside(self) -> list[Part | None]:
        """What each of the other runs reads that need copies; None for one that does not say."""
        return self._runs.beside(time.time())

    def let_go(self, keys: Iterable[bytes], may: Callable[[Sequence[Part | None]], bool]) -> tuple[int, bool]:
        """Remove these, if they ``may`` go beside what the other runs read, and not in the run's first epoch: others
        may be about to begin with it. Returns how many copies went, and whether the disk has their space back."""
        if not self._runs.has_read or not may(self.beside()):
            return 0, True
        doomed = self._ledger.doom(keys)
        return len(doomed), free(self._ledger, self._files, doomed)

    def make_room(self, nbytes: int) -> int:
        """Remove copies of no use, for at least so many bytes if there are as many; returns how many copies went."""
        with self._directory.owned() as owned:
            if not owned:
                return 0
            before, largest = self._runs.limits(time.time())
            if self._excess > 0 and self._runs.budget < largest:
                return 0  # there is room enough for another run
            gone = self._trim()
            return gone + self._remove(max(nbytes + self._excess, min(_AT_ONCE, self._budget >> 6)), before)

    @property
    def _excess(self) -> int:
        return self._ledger.charged() + self._index.nbytes() + self._index.headroom - self._budget

    def _trim(self) -> int:
        before, largest = self._runs.limits(time.time())
        if not before or self._runs.budget < largest or self._excess <= self._index.headroom:
            return 0
        gone = self._remove(self._excess, math.inf)
        self._before = 0.0  # what is left may be of use before it is listed again
        return gone

    def _remove(self, nbytes: int, before: float) -> int:
        gone = 0
        while nbytes > 0 and (keys := self._next(nbytes, before)):
            doomed = self._ledger.doom(keys, before)
            free(self._ledger, self._files, doomed)
            gone += len(doomed)
            nbytes -= sum(doomed.values())
        return gone

    def _next(self, nbytes: int, before: float) -> list[bytes]:
        """Some of those that may go, of about so many bytes at most, the longest unused first."""
        if before != self._before or (not self._listed and not self._is_whole):
            self._list(before)
        keys: list[bytes] = []
        while self._listed and nbytes > 0 and len(keys) < _AT_A_TIME:
            key, length = self._listed.pop()
            keys.append(key)
            nbytes -= max(length, 1)
        return keys

    def _list(self, before: float) -> None:
        """Look for what may go; for more only when that has gone, or others may have become so."""
        entries = (each for each in self._index.all_entries() if each.used_at < before)
        found = heapq.nsmallest(_LISTED, ((each.used_at, each.key, each.length) for each in entries)) if before else []
        self._listed = [(key, length) for _, key, length in reversed(found)]
        self._before, self._is_whole = before, len(found) < _LISTED
