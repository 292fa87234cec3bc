"""What goes wrong with a tier's disk: counted, said once, and whether the tier is of any use after it."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from pathlib import Path

import lmdb

from minato_gpu.notices import say_once
from minato_gpu.sources.disk.records import DamagedIndexError

FAILURES = (OSError, lmdb.Error, DamagedIndexError)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)
# After these the index is of no use to this process.
_BROKEN = (DamagedIndexError, lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.InvalidError)


class Troubles:
    """Counts, by name, of what a tier did and what it could not do; ``off`` says why it has given up, if it has.

    May be used by several threads.
    """

    def __init__(self, path: Path) -> None:
        self.off: str | None = None
        self._path = path
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, name: str, number: int = 1) -> None:
        """Add to a count."""
        with self._lock:
            self._counts[name] += number

    def count_hit(self, nbytes: int) -> None:
        """The same of ``hits`` and ``bytes_read``, in one."""
        with self._lock:
            self._counts["hits"] += 1
            self._counts["bytes_read"] += nbytes

    def counts(self) -> Counter[str]:
        """All of them, as they are now."""
        with self._lock:
            return self._counts.copy()

    def met(self, error: BaseException) -> None:
        """One of ``FAILURES`` has happened."""
        number = error.errno if isinstance(error, OSError) else None
        if number in _FULL or os.strerror(errno.ENOSPC) in str(error) or os.strerror(errno.EFBIG) in str(error):
            self.count("disk_full")
            self._say("the disk is full; what is there is kept, and nothing is added until it has room")
        elif number in _GONE:
            self.give_up("it has vanished")
        elif isinstance(error, _BROKEN):
            self.give_up(f"its index is damaged ({error}); the next run that has it alone empties it")
        else:
            self.count("failed")
            self._say(f"{error}; this counts as a miss")

    def give_up(self, why: str) -> None:
        """From now on everything is a miss."""
        self.count("failed")
        if self.off is None:
            self.off = why
            self._say(f"{why}; training goes on without it")

    def _say(self, text: str) -> None:
        say_once(f"cache in {self._path}: {text}")
