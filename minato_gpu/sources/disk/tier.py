"""The tier: ``find`` a copy, ``read`` it, ``write`` one, ``remove`` some. What to keep is decided elsewhere.

No wrong byte is ever served: an entry is written down after its bytes, names the version that they are of, and holds
their checksum, which every read compares. Whatever goes wrong with the disk is a miss, counted, and said once.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from xxhash import xxh3_64_intdigest as checksum_of

from minato_gpu.caching.orders import Part
from minato_gpu.sources.disk import LEAST_BUDGET, records
from minato_gpu.sources.disk.directory import CacheDirectoryError, Directory
from minato_gpu.sources.disk.files import SegmentFiles
from minato_gpu.sources.disk.filesystem import Uncached
from minato_gpu.sources.disk.freeing import free, recover
from minato_gpu.sources.disk.index import Index
from minato_gpu.sources.disk.ledger import Ledger
from minato_gpu.sources.disk.records import Entry, Place, Room, Verified, allotted
from minato_gpu.sources.disk.runs import Runs
from minato_gpu.sources.disk.troubles import FAILURES, Troubles
from minato_gpu.sources.disk.upkeep import Upkeep
from minato_gpu.sources.disk.writer import Writer

T = TypeVar("T")

_OVERHEAD = 512 << 10  # locks, folders, the format
_OVERHEAD_SHIFT = 7  # and for what file systems keep of files with many holes, a 128th of the budget
_AT_A_TIME = 256  # entries removed in one transaction
_UNREADABLE = (errno.ENOENT, errno.EIO, errno.ENODATA)
_COUNTS = (
    *("hits", "misses", "stale", "corrupt", "gone", "bytes_read"),
    *("written", "bytes_written", "refused", "removed", "evicted"),
)


class DiskTier:
    """Copies in ``directory``, of at most ``budget_bytes`` on disk together with all that other processes keep there.

    ``directory`` is made where it is not there yet. A budget of None looks at one that is there, and adds nothing.
    ``segment_bytes``: how large a segment file becomes. One object for each directory and process; threads may share
    it. In a fork's copy everything is a miss. Raises CacheDirectoryError (directory.py), ValueError for a budget that
    is too small for anything. ``run``: a name, and the id of a process: on whose behalf copies of no use are removed
    where there is no room for others (runs.py); else none is.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        budget_bytes: int | None,
        *,
        segment_bytes: int = 256 << 20,
        run: tuple[str, int] | None = None,
    ) -> None:
        if budget_bytes is not None and budget_bytes < LEAST_BUDGET:
            raise ValueError(f"a cache on disk needs a budget of at least {LEAST_BUDGET:,} bytes, got {budget_bytes:,}")
        self._directory = Directory(Path(directory), make=budget_bytes is not None)
        self._troubles = Troubles(self._directory.path)
        self._budget = budget_bytes or 0
        self._closed = False
        self._writing = threading.Lock()
        try:
            with ExitStack() as undo:
                undo.callback(self._directory.close)
                self._index = Index(self._directory.index)
                undo.callback(self._index.close)
                self._ledger = Ledger(self._index, self._directory.block)
                self._files = SegmentFiles(self._directory.segments.fd)
                if self._directory.alone:
                    recover(self._ledger, self._files)
                if budget_bytes is not None:
                    self._directory.need_room(budget_bytes, self._ledger.charged() + self._index.nbytes())
                self._upkeep = None if run is None else self._made_upkeep(run)
                self._directory.enter()
                undo.pop_all()
        except FAILURES as error:
            raise CacheDirectoryError(f"the cache in {self._directory.path} cannot be opened: {error}") from error
        self._uncached = Uncached()
        self._writer = Writer(self._files, self._ledger, self._uncached, segment_bytes)
        _OPEN.add(self)

    def find(self, key: bytes, version: bytes) -> Entry | None:
        """The copy of ``key``, if there is one of this version. One of another version is dropped. Reads no data."""
        if self._troubles.off is not None:
            return None
        try:
            entry = self._index.find(key)
            if entry is not None:
                if entry.version == version:
                    return entry
                self._troubles.count("stale")
                free(self._ledger, self._files, self._ledger.doom_this(entry))
        except FAILURES as error:
            self._troubles.met(error)
        self._troubles.count("misses")
        return None

    def read(self, entry: Entry, into: memoryview) -> bool:
        """Read the bytes of ``entry`` into the first ``entry.length`` bytes of ``into``, a flat view of bytes.

        False where they cannot be had, or are not what was written: a miss, after which ``into`` may hold anything and
        the copy is gone. Raises ValueError where ``into`` is too short.
        """
        if len(into) != entry.length:
            if len(into) < entry.length:
                raise ValueError(f"{entry.length} bytes do not go into {len(into)}")
            into = into[: entry.length]
        if not self._fetch(entry, into):
            self._troubles.count("misses")
            return False
        self._troubles.count_hit(entry.length)
        if self._upkeep is not None:
            self._upkeep.used(entry)
        return True

    def write(self, key: bytes, version: bytes, data: memoryview) -> bool:
        """Keep a copy of ``data``, the bytes of ``key`` in this version.

        False where budget or disk forbid it. Of one process, one copy is written at a time. Raises ValueError for a key
        or a version that is too long; give a digest then.
        """
        if not 0 < len(key) <= records.LONGEST_KEY or len(version) > records.LONGEST_VERSION:
            raise ValueError(
                f"a key has 1 to {records.LONGEST_KEY} bytes and a version at most {records.LONGEST_VERSION}, got "
                f"{len(key)} and {len(version)}; give a digest"
            )
        with self._writing:
            return self._if_it_can(lambda: self._put(key, version, memoryview(data).cast("B")), False)

    def remove(self, keys: Iterable[bytes]) -> int:
        """Drop copies, and give their space back to the disk; returns how many bytes of it.

        A reader that has found one of them before reads it whole, or misses.
        """
        freed = 0
        rest = iter(keys)

        def act() -> None:
            nonlocal freed
            while chunk := list(islice(rest, _AT_A_TIME)):
                doomed = self._ledger.doom(chunk)
                free(self._ledger, self._files, doomed)
                self._troubles.count("removed", len(doomed))
                freed += sum(doomed.values())

        self._if_it_can(act, None)
        return freed

    def begin_epoch(self, part: Part | None = None) -> None:
        """The run begins an epoch. From its second one on it makes room for what it reads. ``part``: of the epoch, for
        other runs to see."""
        self._do(lambda upkeep: self._troubles.count("evicted", upkeep.begin(part)))

    def beside(self) -> list[Part | None]:
        """What the other runs read that need copies, each in its epoch; None for one that does not say."""
        upkeep = self._upkeep
        return [None] if upkeep is None else self._if_it_can(upkeep.beside, [None])

    def let_go(self, keys: Iterable[bytes], may: Callable[[Sequence[Part | None]], bool]) -> bool:
        """Drop copies that the run has used and will not need soon; not in its first epoch, and only if that ``may`` be
        beside what other runs read. False where the disk does not give their space back."""
        upkeep, rest, gives_back = self._upkeep, iter(keys), True
        while upkeep is not None and gives_back and (chunk := list(islice(rest, _AT_A_TIME))):
            with self._writing:
                gone, gives_back = self._if_it_can(partial(upkeep.let_go, chunk, may), (0, True))
            self._troubles.count("removed", gone)
        return gives_back

    def room(self) -> Room:
        """What there is room for."""

        def look() -> Room:
            free = self._budget - self._overhead - self._index.nbytes() - self._index.headroom
            return Room(free, self._index.count(), self._ledger.charged())

        return self._if_it_can(look, Room(0, 0, 0))

    def tell_uses(self) -> None:
        """Let other processes see what has been read; to be called within a minute of it."""
        self._do(Upkeep.tell)

    def entries(self) -> Iterator[Entry]:
        """Every copy, by key; some of those that come or go meanwhile."""
        try:
            if self._troubles.off is None:
                yield from self._index.all_entries()
        except FAILURES as error:
            self._troubles.met(error)

    def nbytes(self) -> int:
        """Bytes of disk that count against the budget, those of all processes: at most that many are taken."""
        return self._if_it_can(lambda: self._ledger.charged() + self._index.nbytes() + self._overhead, 0)

    def stats(self) -> dict[str, Any]:
        """Counts of this process (``hits``, ``stale``, ``corrupt`` ...) and what the directory holds."""
        counts = dict.fromkeys(_COUNTS, 0) | self._troubles.counts()
        return counts | {"nbytes": self.nbytes(), "budget_bytes": self._budget, "off": self._troubles.off}

    def verify(self) -> Verified:
        """Read every copy, and drop those that are not what was written."""
        sizes = []
        before = self._troubles.counts()["corrupt"]
        for entry in self.entries():
            self._fetch(entry, memoryview(bytearray(entry.length)))
            sizes.append(entry.length)
        return Verified(len(sizes), sum(sizes), self._troubles.counts()["corrupt"] - before)

    def close(self) -> None:
        """Let go of the directory; the copies stay. After it everything is a miss."""
        with self._writing:
            if self._closed:
                return
            self._closed = True
            try:
                if self._upkeep is not None and self._troubles.off is None:
                    self._upkeep.tell()
                self._writer.close()
                self._troubles.off = "it has been closed"
                self._index.close()
            except FAILURES as error:
                self._troubles.met(error)
            self._files.close()
            self._directory.close()

    def forked(self) -> None:
        """This is a fork's copy from now on: LMDB's maps and this process's locks are the parent's."""
        self._troubles = Troubles(self._directory.path)  # another thread may have held these locks as the fork was made
        self._writing = threading.Lock()
        self._troubles.off = "it was opened before this process was forked"
        self._closed = True
        self._writer.abandon()
        self._index.forked()
        self._directory.close()

    def _made_upkeep(self, run: tuple[str, int]) -> Upkeep:
        runs = Runs(self._index, *run, self._budget)
        return Upkeep(self._index, self._ledger, self._files, self._directory, runs, self._budget - self._overhead)

    def _do(self, act: Callable[[Upkeep], None]) -> None:
        if (upkeep := self._upkeep) is not None:
            with self._writing:
                self._if_it_can(lambda: act(upkeep), None)

    def _if_it_can(self, act: Callable[[], T], otherwise: T) -> T:
        """What ``act`` returns; ``otherwise``, where the tier is off or the disk fails."""
        try:
            if self._troubles.off is None:
                return act()
        except FAILURES as error:
            self._troubles.met(error)
        return otherwise

    @property
    def _overhead(self) -> int:
        return _OVERHEAD + (self._budget >> _OVERHEAD_SHIFT)

    def _put(self, key: bytes, version: bytes, data: memoryview) -> bool:
        known = self._index.find(key)
        if known is not None and known.version == version:
            return True
        size = allotted(len(data), self._directory.block)
        place = self._place(data, size) if self._budget else None
        if place is None:
            self._troubles.count("refused")
            return False
        entry = Entry(key, version, *place, len(data), checksum_of(data), time.time())
        added, doomed = self._ledger.add(entry)
        if added:
            self._writer.keep(size)
            self._troubles.count("written")
            self._troubles.count("bytes_written", len(data))
        free(self._ledger, self._files, doomed)
        return True

    def _place(self, data: memoryview, size: int) -> Place | None:
        budget = self._budget - self._overhead
        place = self._writer.put(data, size, budget)
        if place is None and self._upkeep is not None and (gone := self._upkeep.make_room(size)):
            self._troubles.count("evicted", gone)
            place = self._writer.put(data, size, budget)
        return place

    def _fetch(self, entry: Entry, into: memoryview) -> bool:
        if self._troubles.off is not None:
            return False
        try:
            file = self._files.opened(entry.segment)
            if self._uncached.read(file.fd, into, entry.offset) == entry.length and checksum_of(into) == entry.checksum:
                return True
        except OSError as error:
            if error.errno not in _UNREADABLE:
                self._troubles.met(error)
                return False
        try:  # another process has removed it since it was found, or it is spoilt
            doomed = self._ledger.doom_this(entry)
            self._troubles.count("corrupt" if doomed else "gone")
            free(self._ledger, self._files, doomed)
        except FAILURES as error:
            self._troubles.met(error)
        return False


_OPEN: weakref.WeakSet[DiskTier] = weakref.WeakSet()


def _after_fork() -> None:
    for tier in _OPEN:
        tier.forked()


os.register_at_fork(after_in_child=_after_fork)
