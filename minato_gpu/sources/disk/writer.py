"""Where a process puts bytes: at the end of a segment of its own."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from minato_gpu.sources.disk.files import OpenFile, SegmentFiles
from minato_gpu.sources.disk.filesystem import Uncached
from minato_gpu.sources.disk.ledger import Ledger
from minato_gpu.sources.disk.records import Place

_LEASE = 8 << 20  # bytes that are asked for at a time


class Writer:
    """Appends to one segment after the other, each of ``segment_bytes``, or of one entry that is larger.

    It goes on with what processes before it have left. Used by one thread at a time. Methods raise OSError, lmdb.Error
    and DamagedIndexError; what has been written in part then is overwritten by the next.
    """

    def __init__(self, files: SegmentFiles, ledger: Ledger, uncached: Uncached, segment_bytes: int) -> None:
        self._files = files
        self._ledger = ledger
        self._uncached = uncached
        self._segment_bytes = segment_bytes
        self._file: OpenFile | None = None
        self._number = 0
        self._end = 0
        self._leased = 0

    def put(self, data: memoryview, size: int, budget: int) -> Place | None:
        """Write ``data``, for which ``size`` bytes are set aside; None where the budget has not as many.

        It lies there for an entry to be made, which ``keep`` then says; else the next overwrites it.
        """
        if self._file is not None and self._end and self._end + size > self._segment_bytes:
            self._let_go(full=True)
        file = self._file or self._next()
        if os.fstat(file.fd).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "the segment that was being written to has been deleted")
        if self._leased < size:
            step = min(_LEASE, budget >> 6, max(self._segment_bytes - self._end, 0))
            self._leased = self._ledger.lease(self._number, size, step, budget) or self._leased
            if self._leased < size:
                return None
        self._uncached.write(file.fd, data, self._end)
        return self._number, self._end

    def keep(self, size: int) -> None:
        """What ``put`` wrote last is an entry's now."""
        self._end += size
        self._leased -= size

    def close(self) -> None:
        """Hand the segment over to whoever writes next."""
        if self._file is not None:
            with suppress(OSError):
                self._file.cut(self._end)
            self._let_go(full=False)

    def abandon(self) -> None:
        """Forget the segment without a word to the index, as a fork's copy must."""
        self._file = None

    def _let_go(self, full: bool) -> None:
        self._ledger.release(self._number, full)
        self._file = None
        if full:
            self._ledger.settle({self._number: 0}, self._files.delete)

    def _next(self) -> OpenFile:
        self._leased = 0
        for segment in self._ledger.accounts():
            file = None if segment.full else self._files.take(segment.number)
            end = None if file is None else self._ledger.resume(segment.number, file.cut)
            if file is not None and end is not None:
                self._file, self._number, self._end = file, segment.number, end
                return file
        self._number, made = self._ledger.begin(self._files.create)
        self._file, self._end = made, 0
        return made
