"""Anonymous shared memory: a sparse memfd that a process maps whole, and that others inherit or attach to.

It needs no name and no room in /dev/shm, and vanishes with its last mapping however the processes end (promise P7).

Decision: a loader has one such file for all of its arenas, marks and its board. One for each of them took two
descriptors for each worker, as Python's mmap keeps one of its own.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from multiprocessing import reduction
from typing import Any

LEAST = 1 << 26  # bytes of an arena: less would not do


class SharedMemory:
    """``nbytes`` of memory, zero until written. Memory is taken as pages are first written.

    With ``fd`` it maps what another process has made, and closes that descriptor with itself.
    """

    def __init__(self, name: str, nbytes: int, fd: int | None = None) -> None:
        self.nbytes = nbytes
        self.fd = os.memfd_create(f"minato-{name}", os.MFD_CLOEXEC) if fd is None else fd
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            if fd is None:
                os.ftruncate(self.fd, nbytes)
            self._map = mmap.mmap(self.fd, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(self.fd)
            raise
        # views and arrays refer to this one, which keeps the mapping from being closed under them
        self._view: memoryview | None = memoryview(self._map)

    @classmethod
    def reserve(cls, name: str, sizes: Sequence[int]) -> tuple[SharedMemory, list[int]]:
        """Makes memory for parts of these sizes, and returns it with the sizes that the system grants.

        Parts are halved, down to ``LEAST`` bytes, until twice as much could be mapped: a limit of address space leaves
        room for the program. Raises OSError.
        """
        granted = list(sizes)
        while max(granted) > LEAST:
            try:
                cls(name, 2 * sum(granted)).close()
                break
            except OSError:
                granted = [max(size // 2, min(size, LEAST)) for size in granted]
        try:
            return cls(name, sum(granted)), granted
        except OSError as error:
            told = f"{error.strerror}: this process cannot map {sum(granted) >> 20} MiB of shared memory; look at its "
            limits = "limits of descriptors, address space and file size (ulimit -n, -v, -f)"
            raise OSError(error.errno, told + limits) from error

    def part(self, begin: int, nbytes: int) -> memoryview:
        """Returns a view of ``nbytes`` from ``begin`` on, which keeps the mapping alive."""
        assert self._view is not None, "the memory is closed"
        return self._view[begin : begin + nbytes]

    def give_back(self, begin: int, nbytes: int) -> None:
        """Returns whole pages (multiples of their size) to the system: they are zero afterwards, for every process."""
        self._map.madvise(mmap.MADV_REMOVE, begin, nbytes)

    def close(self) -> None:
        """Closes the descriptor and, if no view is left, the mapping. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._view = None
        with contextlib.suppress(BufferError):  # the consumer holds batches: the mapping goes with the last of them
            self._map.close()

    def __reduce__(self) -> tuple[object, ...]:  # for start methods that pickle what they hand to a child
        return _attached, (reduction.DupFd(self.fd), self.nbytes)


def _attached(fd: Any, nbytes: int) -> SharedMemory:
    return SharedMemory("attached", nbytes, fd.detach())
