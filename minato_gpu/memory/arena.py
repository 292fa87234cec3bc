"""An arena: anonymous shared memory that one process allocates from and every process of the loader maps.

It is a memfd, so it needs no name, no room in /dev/shm, and vanishes with its last mapping however the processes
end (promise P7). It is sparse: the mapping is as large as the arena may ever grow, memory is taken when a page is
first written, and given back when much of it lies free.

Decision: one big mapping made before the workers start, instead of one memory object per batch passed around by
file descriptor: no descriptor travels, and recycled pages are already mapped on both sides (a fresh page costs
a fault in the worker and another in the consumer).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading

_ALIGN = 4096
_KEEP_FREE = 256 << 20  # free bytes kept for reuse before pages are given back


def round_up(nbytes: int, unit: int) -> int:
    """The least multiple of ``unit`` that is at least ``nbytes``."""
    return -(-nbytes // unit) * unit


class Arena:
    """A sparse shared mapping of ``capacity`` bytes. Only the process that owns it may allocate and free.

    With ``fd`` the memory of an arena made elsewhere is mapped; its owner passes the exact capacity along.
    """

    def __init__(self, name: str, capacity: int = 1 << 36, fd: int | None = None) -> None:
        self.fd = os.memfd_create(f"minato-{name}", os.MFD_CLOEXEC) if fd is None else fd
        self.capacity, self._map = _map(self.fd, capacity, attach=fd is not None)
        # arrays that outlive the arena refer to this view, which keeps the mapping from being closed under them
        self._view: memoryview | None = memoryview(self._map)
        self.allocated = 0
        self._top = 0
        self._free: dict[int, list[int]] = {}
        self._sizes: dict[int, int] = {}
        self._free_bytes = 0
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> int:
        """The offset of a block of at least ``nbytes`` bytes. Raises MemoryError when the arena is full."""
        size = _size_class(nbytes)
        with self._lock:
            blocks = self._free.get(size)
            if blocks:
                offset = blocks.pop()
                self._free_bytes -= size
            else:
                offset = self._top
                if offset + size > self.capacity:
                    raise MemoryError(f"arena of {self.capacity} bytes is full: {self.allocated} bytes are in use")
                self._top += size
                self._sizes[offset] = size
            self.allocated += size
        return offset

    def free(self, offset: int) -> None:
        """Give a block back. Its pages stay mapped for reuse unless much memory lies free already."""
        with self._lock:
            size = self._sizes[offset]
            if self._free_bytes > _KEEP_FREE and self._free_bytes > self.allocated:
                self._map.madvise(mmap.MADV_REMOVE, offset, size)
            self.allocated -= size
            self._free_bytes += size
            self._free.setdefault(size, []).append(offset)

    @property
    def buffer(self) -> memoryview:
        """The whole mapping, for views; it lives until the last view of it dies."""
        assert self._view is not None, "the arena is closed"
        return self._view

    def close(self) -> None:
        """Drop the descriptor and, where no view is left, the mapping."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._view = None
        with contextlib.suppress(BufferError):  # the consumer holds batches: the mapping goes with the last of them
            self._map.close()


def _map(fd: int, capacity: int, *, attach: bool) -> tuple[int, mmap.mmap]:
    """Map the file; a new one is made as large as the address space allows, up to ``capacity``."""
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_NORESERVE", 0)
    while True:
        try:
            if not attach:
                os.ftruncate(fd, capacity)
            return capacity, mmap.mmap(fd, capacity, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError:
            if attach or capacity <= 1 << 26:
                raise
            capacity //= 2


def _size_class(nbytes: int) -> int:
    """Whole pages, at most an eighth wasted, so that blocks of nearly the same size replace each other."""
    step = max(_ALIGN, 1 << max(0, nbytes.bit_length() - 4))
    return round_up(max(nbytes, 1), step)
