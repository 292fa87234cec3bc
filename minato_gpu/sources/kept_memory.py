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

from minato_gpu.memory.arena import Arena, round_up
from minato_gpu.sources.memory_tier import Copy
from minato_gpu.sources.source import FIELDS

_LEAST = 1 << 36  # bytes of address space; memory is taken as it is written
_SLACK = 1 << 30

Left = tuple[int, list[tuple[int, Copy]], tuple[float, ...]]
"""The parts of each sample, items with their copies, and what has been learned of fields."""


class KeptMemory:
    """For one reader process at a time: ``lend`` tells whether it is to be had. ``budget`` in bytes. A fork of the
    process that made it shares the memory, and must make its own."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        capacity = max(_LEAST, round_up(2 * budget + _SLACK, 1 << 20))  # twice: sizes that differ leave gaps
        self._made = Arena("kept", capacity)
        self.table = Table(os.memfd_create("minato-table", os.MFD_CLOEXEC))
        self._lent = False
        weakref.finalize(self, self._made.close)
        weakref.finalize(self, os.close, self.table.fd)

    def lend(self) -> Arena | None:
        """The arena, for a reader process and its workers, until it is given back; None while others have it."""
        if self._lent:
            return None
        self._lent = True
        return Arena("kept", self._made.capacity, fd=os.dup(self._made.fd))

    def give_back(self) -> None:
        """The reader process has ended; if it was killed, nothing of it is kept."""
        if self._lent and not self.table.whole:
            self._made.forsake(())
        self._lent = False


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
