"""Shared memory whose copies outlive the reader process that made them: workers, and their reader process, may be
started anew for every epoch, and what was kept must not be read again for that.

It is an arena, and beside it a *table* of what lies there: written by a reader process as it ends, taken up by the
next. While one is at work there is no table, so a process that was killed leaves nothing that could be wrong.
"""

from __future__ import annotations

import marshal
import os
import weakref
from multiprocessing import reduction

from minato_gpu.memory import address_space
from minato_gpu.memory.arena import MOST, Arena, round_up
from minato_gpu.sources.memory_tier import Copy
from minato_gpu.sources.source import FIELDS

_TOO_LARGE = (
    "the cache keeps {budget} bytes in memory, for which {capacity} bytes of address space are reserved: raise the "
    "limits of address space and file size (ulimit -v, ulimit -f), or pass a smaller cache"
)

Left = tuple[int, list[tuple[int, Copy]], tuple[float, ...]]
"""The parts of each sample, items with their copies, and what has been learned of fields."""


class KeptMemory:
    """For one reader process at a time: ``lend`` tells whether it is to be had. ``budget`` in bytes. A fork of the
    process that made it shares the memory, and must make its own."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        # twice, as sizes that differ leave gaps; and what is read ahead. Memory is taken as it is written
        wanted = round_up(2 * budget, 1 << 20) + address_space.share(MOST)
        self._capacity = min(wanted, address_space.largest_file() >> 20 << 20)
        self.fd = os.memfd_create("minato-kept", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        self.table = Table(os.memfd_create("minato-table", os.MFD_CLOEXEC))
        weakref.finalize(self, os.close, self.table.fd)
        self._lent: Arena | None = None

    def lend(self) -> Arena | None:
        """The arena, for a reader process and its workers, until it is given back; None while others have it. Raises
        OSError where there is not so much address space."""
        if self._lent is not None:
            return None
        try:
            os.ftruncate(self.fd, self._capacity)
            self._lent = Arena("kept", self._capacity, fd=os.dup(self.fd))
        except OSError as error:
            raise OSError(error.errno, _TOO_LARGE.format(budget=self.budget, capacity=self._capacity)) from error
        return self._lent

    def give_back(self) -> None:
        """The reader process has ended; if it was killed, nothing of it is kept. The arena is not closed yet."""
        if self._lent is not None and self._lent.fd >= 0 and not self.table.whole:
            self._lent.forsake(())
        self._lent = None


class Table:
    """What lies in the arena, in a file of its own."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @property
    def whole(self) -> bool:
        """Whether there is something to take."""
        return os.pread(self.fd, 1, 0) == _WHOLE

    def take(self, fields_made_by: bytes = b"") -> Left | None:
        """What the last process has left; it is gone with that. None where there is nothing. Fields that something else
        has made are left out, with what has been learned of them."""
        data = os.pread(self.fd, os.fstat(self.fd).st_size, 0)
        os.ftruncate(self.fd, 0)
        if data[:1] != _WHOLE:
            return None
        parts, rows, learned, made_by = marshal.loads(data[1:])
        copies = [(item, Copy(*copy)) for item, copy in rows]
        if made_by == fields_made_by:
            return parts, copies, learned
        return parts, [(item, copy) for item, copy in copies if copy.key[0] != FIELDS], ()

    def leave(self, left: Left, fields_made_by: bytes = b"") -> None:
        """Write it all; its first byte says last that it is whole."""
        data = marshal.dumps((left[0], [(item, tuple(copy)) for item, copy in left[1]], left[2], fields_made_by))
        at = 0
        while at < len(data):
            at += os.pwrite(self.fd, data[at:], 1 + at)
        os.pwrite(self.fd, _WHOLE, 0)

    def __getstate__(self) -> object:
        return reduction.DupFd(self.fd)

    def __setstate__(self, state: object) -> None:
        self.fd = state.detach()  # type: ignore[attr-defined]


_WHOLE = b"W"
