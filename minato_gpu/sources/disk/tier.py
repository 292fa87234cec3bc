"""The cache on disk: ``read`` a copy, ``write`` one, ``remove`` some.

No wrong byte is ever served: a copy is written beside its place and renamed, names the version that it is of, and holds
a checksum, which every read compares. Whatever goes wrong with the disk is a miss, counted, and logged once.
"""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from minato_gpu.sources.disk import LEAST_BUDGET, entry
from minato_gpu.sources.disk.account import Account, Totals
from minato_gpu.sources.disk.directory import CacheDirectoryError, need_room, open_directory
from minato_gpu.sources.disk.entry import CacheEntry, disk_space_of, path_of, scan
from minato_gpu.sources.disk.filesystem import OpenFile, read_parts, write_parts
from minato_gpu.sources.disk.runs import CacheRun, find_runs, remove_dead
from minato_gpu.util.messages import say_once

T = TypeVar("T")

_FOLDERS = 1 << 20  # bytes that folders take, one block each
_NAMES_SHIFT = 6  # and names in them: of files of one block each, less than a 64th of what those take
_SPARE_SHIFT = 6  # eviction frees a 64th of the budget at a time, as each time all copies are looked at
_USED_S = 3600.0  # a copy that has been used so recently is not marked again
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOATIME
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNREADABLE = (errno.EIO, errno.ENODATA)
_CLOSED = "it has been closed"
_COUNTS = (
    *("hits", "misses", "stale", "corrupt", "bytes_read"),
    *("written", "bytes_written", "refused", "removed", "evicted"),
)


class Room(NamedTuple):
    """Bytes that copies may take, of all processes together; how many copies there are, and what they take."""

    nbytes: int
    copies: int
    taken: int


class DiskTier:
    """Copies in ``directory``, of at most ``budget_bytes`` on disk together with all that other processes keep there.

    ``directory`` is made where it is not there yet. A budget of None looks at one that is there, and adds nothing. Any
    number of threads may read, one at a time does all else. Not to be used in a fork. Raises CacheDirectoryError
    (directory.py), ValueError for a budget that is too small for anything.
    """

    def __init__(self, directory: str | os.PathLike[str], budget_bytes: int | None) -> None:
        if budget_bytes is not None and budget_bytes < LEAST_BUDGET:
            raise ValueError(f"a cache on disk needs a budget of at least {LEAST_BUDGET:,} bytes, got {budget_bytes:,}")
        self._path = Path(directory).expanduser().absolute()
        self._directory = open_directory(self._path, make=budget_bytes is not None)
        self._root = self._directory.fd
        self._budget = budget_bytes or 0
        self._room = self._budget - self._overhead
        self._off: str | None = None
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._account = Account(self._path, self._root)
        self._run: CacheRun | None = None
        try:
            if budget_bytes is not None:
                self._enter(budget_bytes)
        except OSError as error:
            if error.errno not in (*_FULL, errno.EROFS):
                self.close()
                raise CacheDirectoryError(f"the cache in {self._path} cannot be opened: {error}") from error
            self._failed(error)  # what is there is served
        except CacheDirectoryError:
            self.close()
            raise

    def read(self, key: bytes, version: bytes, allocate: Callable[[int], memoryview]) -> int | None:
        """Reads the copy of ``key`` in this version into what ``allocate`` returns for its bytes, and returns how many.

        None is a miss: what was allocated, if anything, may hold anything then. A copy that is of another version, or
        not what was written, is removed. Raises what ``allocate`` does.
        """
        if self._off is not None:
            return None
        name = path_of(key)
        try:
            fd = os.open(name, _OPEN_FLAGS, dir_fd=self._root)
        except OSError as error:
            if error.errno != errno.ENOENT:
                self._failed(error)
            self._count(misses=1)
            return None
        try:
            found = os.fstat(fd)
            length = found.st_size - entry.HEAD
            wrong = "corrupt" if length < 0 else self._fault(fd, allocate(length), key, version)
            if not wrong:
                self._used(fd, found.st_mtime)
        finally:
            os.close(fd)
        if not wrong:
            self._count(hits=1, bytes_read=length)
            return length
        self._count(misses=1)
        if wrong in ("corrupt", "stale"):
            self._drop(name, found.st_ino, wrong)
        return None

    def write(self, key: bytes, version: bytes, data: memoryview) -> bool:
        """Keeps a copy of ``data``, the bytes of ``key`` in this version. Returns True also if there is one already,
        False if budget or disk forbid it."""
        name, data = path_of(key), memoryview(data).cast("B")
        if self._off is None and self._is_there(name, key, version, len(data)):
            return True
        kept = self._if_it_can(lambda: self._keep(name, entry.header(key, version, data), data), None)
        if kept is None:
            return False
        self._count(**{"written": 1, "bytes_written": len(data)} if kept else {"refused": 1})
        return kept

    def remove(self, keys: Iterable[bytes]) -> int:
        """Drops copies; returns how many bytes of disk they took."""
        names = map(path_of, keys)
        gone = self._if_it_can(lambda: self._account.remove(names), Totals())
        self._count(removed=gone.copies)
        return gone.nbytes

    def begin_epoch(self) -> None:
        """Notes that the run begins an epoch. From its second one on it makes room for what it reads."""
        self._if_it_can(self._begin, None)

    def is_alone(self) -> bool:
        """Returns whether this is a run, and no other run uses the directory."""
        run = self._run
        return run is not None and self._if_it_can(lambda: not find_runs(self._root, run.name)[0], False)

    def let_go(self, keys: Iterable[bytes]) -> None:
        """Drops copies that the run has used and will not need soon, where it is alone; not in its first epoch."""
        if self._run is not None and self._run.has_read and self.is_alone():
            self.remove(keys)

    def room(self) -> Room:
        """Returns what there is room for."""
        totals = self._if_it_can(self._account.look, Totals())
        return Room(self._room, totals.copies, totals.nbytes)

    def entries(self) -> Iterator[CacheEntry]:
        """Yields every copy (none if the tier is off); one that comes or goes meanwhile may be among them."""
        if self._off is None:
            yield from scan(self._path)

    def nbytes(self) -> int:
        """Returns the bytes of disk that count against the budget, those of all processes; 0 if the tier is off."""
        return self._if_it_can(lambda: self._account.look().nbytes + self._overhead, 0)

    def stats(self) -> dict[str, Any]:
        """Returns counts of this process (``hits``, ``stale``, ``corrupt`` ...), what the directory holds, and as "off"
        why the tier does nothing any more (None: it works)."""
        with self._lock:
            counts = dict.fromkeys(_COUNTS, 0) | self._counts
        return counts | {"nbytes": self.nbytes(), "budget_bytes": self._budget, "off": self._off}

    def count_anew(self) -> None:
        """Sets all counts to 0."""
        with self._lock:
            self._counts.clear()

    def is_there(self) -> bool:
        """Returns whether the tier works, and its directory has not been deleted."""
        return self._off is None and os.fstat(self._root).st_nlink > 0

    def close(self) -> None:
        """Closes the directory; the copies stay. After it everything is a miss."""
        if self._off == _CLOSED:
            return
        run, self._run = self._run, None
        if run is not None:
            with suppress(OSError), self._account.change():
                run.close()
        self._off = _CLOSED
        self._directory.close()

    # --- opening ---------------------------------------------------------------------------------------------

    def _enter(self, budget: int) -> None:
        """Registers this process as a run.

        Files of processes that died are removed; if no other run lives, all copies are counted anew.
        """
        with self._account.change() as totals:
            living, dead = find_runs(self._root)
            self._run = CacheRun(self._root)  # first: should this process die, too, the next one counts
            totals.nbytes -= remove_dead(self._root, dead)
            if dead and not living:
                now = self._account.count_all()
                totals.nbytes, totals.copies = now.nbytes, now.copies
            need_room(self._path, budget, totals.nbytes)

    @property
    def _overhead(self) -> int:
        return _FOLDERS + (self._budget >> _NAMES_SHIFT)

    def _begin(self) -> None:
        if self._run is None and self._budget:  # the disk was full
            with suppress(CacheDirectoryError):
                self._enter(self._budget)
        run = self._run
        if run is not None:
            run.begin_epoch()
            with self._account.change() as totals:
                totals.nbytes -= remove_dead(self._root, find_runs(self._root, run.name)[1])
            if self._unused_before(run) and self._account.look().nbytes > self._room:  # it may be smaller than it was
                self._count(evicted=self._account.evict(self._room, 0, math.inf))

    # --- reading ---------------------------------------------------------------------------------------------

    def _fault(self, fd: int, into: memoryview, key: bytes, version: bytes) -> str:
        """Reads an open copy. Returns what is wrong with it; "" if nothing is."""
        head = bytearray(entry.HEAD)
        try:
            done = read_parts(fd, head, into)
        except OSError as error:
            if error.errno in _UNREADABLE:
                return "corrupt"
            self._failed(error)
            return "failed"
        return "corrupt" if done < entry.HEAD + len(into) else entry.fault(head, into, key, version)

    def _used(self, fd: int, marked: float) -> None:
        """Marks an open copy as used, once an hour, and once by each run."""
        now = time.time()
        if self._run is not None and marked < max(self._run.began, now - _USED_S):
            with suppress(OSError):  # of a disk that can only be read any more
                os.utime(fd)

    def _drop(self, name: str, inode: int, why: str) -> None:
        """Removes a copy if it is still this file, and counts it."""
        self._if_it_can(lambda: self._account.remove([name], inode=inode), None)
        self._count(**{why: 1})

    # --- writing ---------------------------------------------------------------------------------------------

    def _is_there(self, name: str, key: bytes, version: bytes, length: int) -> bool:
        try:
            file = OpenFile(os.open(name, _OPEN_FLAGS, dir_fd=self._root))
            return entry.is_of(os.pread(file.fd, entry.HEAD, 0), length, key, version)
        except OSError:
            return False

    def _keep(self, name: str, head: bytes, data: memoryview) -> bool:
        run, size = self._run, disk_space_of(len(data))
        if run is None:
            return False
        file = self._reserved(run, size)
        if file is None and (before := self._unused_before(run)):
            self._count(evicted=self._account.evict(self._room, max(size, self._room >> _SPARE_SHIFT), before))
            file = self._reserved(run, size)
        if file is None:
            return False
        new, fd = file
        try:
            try:
                write_parts(fd, head, data)
            finally:
                os.close(fd)
            self._publish(run, new, name, size)
        except BaseException:
            with self._account.change() as totals:
                os.unlink(new, dir_fd=run.folder.fd)
                totals.nbytes -= size
            raise
        return True

    def _reserved(self, run: CacheRun, size: int) -> tuple[str, int] | None:
        """Makes a file whose bytes are on the account; None where there is no room for them."""
        with self._account.change() as totals:
            if totals.nbytes + size > self._room:
                return None
            totals.nbytes += size
            try:
                return run.new_file(size)
            except OSError:
                totals.nbytes -= size
                raise

    def _unused_before(self, run: CacheRun) -> float:
        """Returns the time since which every copy that is of use to any run has been used; 0.0: any may be."""
        return min([run.uses_since, *find_runs(self._root, run.name)[0]])

    def _publish(self, run: CacheRun, new: str, name: str, size: int) -> None:
        """Renames a file that has been written to its name in the directory, and corrects the account."""
        with self._account.change() as totals:
            took = os.stat(new, dir_fd=run.folder.fd).st_blocks * 512
            before, more = 0, 1
            with suppress(FileNotFoundError):
                before, more = os.stat(name, dir_fd=self._root, follow_symlinks=False).st_blocks * 512, 0
            try:
                os.rename(new, name, src_dir_fd=run.folder.fd, dst_dir_fd=self._root)
            except FileNotFoundError:
                os.mkdir(name[:2], 0o700, dir_fd=self._root)
                os.rename(new, name, src_dir_fd=run.folder.fd, dst_dir_fd=self._root)
            totals.nbytes += took - size - before
            totals.copies += more

    # --- troubles --------------------------------------------------------------------------------------------

    def _if_it_can(self, act: Callable[[], T], otherwise: T) -> T:
        """Calls ``act`` and returns its result; ``otherwise`` if the tier is off or the disk fails."""
        try:
            if self._off is None:
                return act()
        except OSError as error:
            self._failed(error)
        return otherwise

    def _failed(self, error: OSError) -> None:
        if error.errno in _FULL:
            self._count(disk_full=1)
            self._say("the disk is full; what is there is kept, and nothing is added until it has room")
            return
        self._count(failed=1)
        if error.errno not in (errno.ENOENT, errno.ESTALE, errno.ENOTDIR):
            self._say(f"{error}; this counts as a miss")
        elif self._off is None:
            self._off = "it has vanished"
            self._say("it has vanished; training goes on without it")

    def _count(self, **numbers: int) -> None:
        with self._lock:
            for name, number in numbers.items():
                self._counts[name] += number

    def _say(self, text: str) -> None:
        say_once(f"cache in {self._path}: {text}")
