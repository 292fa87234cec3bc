"""An arena: shared memory that one process allocates from and every process of the loader maps.

It is sparse: the mapping is as large as the arena may ever grow, memory is taken when a page is first written, and
given back when much of it is free.

Decision: one big mapping made before the workers start, instead of one memory object per batch passed around by
file descriptor: no descriptor travels, and recycled pages are already mapped on both sides (a fresh page costs
a fault in the worker and another in the consumer, and the kernel clears it first).

Decision: the lowest free extent that is large enough (first fit by address), neighbours joined when freed. Lists of
free blocks by size are faster to search, but a block of one size serves no other: where sizes vary from batch to batch,
as those of padded ones do, memory stays free while fresh pages are taken and cleared.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable

from minato_gpu.memory.shared_memory import SharedMemory

MOST = 1 << 36  # bytes of address space, where nothing limits that
PAGE = 4096
_FINE = 16 * PAGE - 1  # bytes up to which an eighth is less than a page
_KEEP_FREE = 256 << 20  # bytes of memory kept beyond what was lately in use at once
_LATELY = 1024  # blocks freed, in which the peak of what is in use falls by two thirds


def round_up(nbytes: int, unit: int) -> int:
    """Returns the least multiple of ``unit`` that is at least ``nbytes``."""
    return -(-nbytes // unit) * unit


class Arena:
    """A sparse shared mapping of ``capacity`` bytes. Only the process that owns it may allocate and free;
    another can be its next owner when that has died.
    """

    def __init__(
        self, name: str, capacity: int = 0, fd: int | None = None, memory: SharedMemory | None = None, begin: int = 0
    ) -> None:
        """Makes an arena of ``capacity`` bytes: of ``memory`` from ``begin`` on, which it does not close; or of ``fd``,
        which another process has made.

        With neither it makes its own memory, or less under a limit of address space (see ``SharedMemory.reserve``, and
        what that raises); ``capacity`` 0 then means as much as costs nothing to reserve.
        """
        self._owns = memory is None
        if fd is not None:
            memory = SharedMemory(name, capacity, fd)
        elif memory is None:
            memory, (capacity,) = SharedMemory.reserve(name, [capacity or MOST])
        self.capacity, self._memory, self._at = capacity, memory, begin
        self._view: memoryview | None = memory.part(begin, capacity)
        self.allocated = 0
        self._sizes: dict[int, int] = {}
        # free extents in rising order: where each begins, where it ends, and how many bytes of it may hold memory
        self._begins = [0]
        self._ends = [self.capacity]
        self._used = [0]
        self._kept = 0  # the sum of the last
        self._peak = 0.0  # recent peak of the bytes in use
        self._held = 0  # pages below this offset are never given back
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> int:
        """Returns the offset of a new block of at least ``nbytes`` bytes. Raises MemoryError when the arena is full."""
        size = rounded(nbytes)
        with self._lock:
            begins, ends = self._begins, self._ends
            for at, offset in enumerate(begins):
                if ends[at] - offset >= size:
                    break
            else:
                raise MemoryError(
                    f"shared memory of {self.capacity} bytes is full: {self.allocated} are in use, and {nbytes} more "
                    "are needed. Raise the limit of address space if there is one (ulimit -v), or prefetch less"
                )
            reused = min(size, self._used[at])
            self._used[at] -= reused
            self._kept -= reused
            begins[at] += size
            if begins[at] == ends[at]:
                del begins[at], ends[at], self._used[at]
            self._sizes[offset] = size
            self.allocated += size
        return offset

    def free(self, offset: int) -> None:
        """Frees a block. Its pages stay for reuse, unless the arena holds much more than it has lately needed."""
        with self._lock:
            size = self._sizes.pop(offset)
            self._peak = max(self.allocated, self._peak * (1 - 1 / _LATELY))
            self.allocated -= size
            self._kept += size
            at = self._join(offset, offset + size)
            begin, end = max(self._begins[at], self._held), self._ends[at]
            if begin < end and self._kept + self.allocated > self._peak + _KEEP_FREE:
                self._memory.give_back(self._at + begin, end - begin)
                left = min(self._used[at], begin - self._begins[at])
                self._kept -= self._used[at] - left
                self._used[at] = left

    def trim(self) -> None:
        """Returns the memory of all that is free to the system."""
        with self._lock:
            for at, (begin, end) in enumerate(zip(self._begins, self._ends, strict=True)):
                begin = max(begin, self._held)
                if self._used[at] and begin < end:
                    self._memory.give_back(self._at + begin, end - begin)
                    self._kept -= self._used[at]
                    self._used[at] = 0

    def keep(self, end: int) -> None:
        """Keeps pages below this offset where they are from now on, as a device reads them by their physical address.
        The offset replaces that of an earlier call, also if it is lower."""
        with self._lock:
            self._held = end

    def occupy(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Makes these blocks (offset and bytes) of the last owner the only ones in use; each is to be freed later.

        Called in a new owner's arena.
        """
        sizes = {offset: _paged(nbytes) for offset, nbytes in blocks}
        gaps = self._beside(sizes)
        with self._lock:
            self._sizes, self.allocated = sizes, sum(sizes.values())
            self._begins, self._ends = [begin for begin, _ in gaps], [end for _, end in gaps]
            self._used, self._kept = [0] * len(gaps), 0

    def forsake(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Returns the memory of all but these blocks (offset and bytes) to the system, as the owner has died."""
        for begin, end in self._beside({offset: _paged(nbytes) for offset, nbytes in blocks}):
            self._memory.give_back(self._at + begin, end - begin)

    def _beside(self, sizes: dict[int, int]) -> list[tuple[int, int]]:
        """Returns the gaps around blocks as (begin, end) pairs, those at the arena's ends too. ``sizes``: bytes by
        offset."""
        ends = [0, *(offset + size for offset, size in sorted(sizes.items()))]
        return [(lo, hi) for lo, hi in zip(ends, (*sorted(sizes), self.capacity), strict=True) if lo < hi]

    def _join(self, begin: int, end: int) -> int:
        """Adds a freed block to the free extents, joined with its neighbours; returns the extent's index."""
        begins, ends, used = self._begins, self._ends, self._used
        at, size = bisect_right(begins, begin), end - begin
        if at < len(begins) and begins[at] == end:
            end = ends.pop(at)
            size += used.pop(at)
            del begins[at]
        if at > 0 and ends[at - 1] == begin:
            ends[at - 1] = end
            used[at - 1] += size
            return at - 1
        begins.insert(at, begin)
        ends.insert(at, end)
        used.insert(at, size)
        return at

    @property
    def buffer(self) -> memoryview:
        """The whole arena, for views; its memory lives until the last view of it dies."""
        assert self._view is not None, "the arena is closed"
        return self._view

    @property
    def fd(self) -> int:
        """The descriptor of its memory; -1 once that is closed."""
        return self._memory.fd

    def close(self) -> None:
        """Drops the arena's own view of its memory, and closes memory that it has made. Idempotent."""
        self._view = None
        if self._owns:
            self._memory.close()

    def __reduce__(self) -> tuple[object, ...]:
        return Arena, ("attached", self.capacity, None, self._memory, self._at)


def _paged(nbytes: int) -> int:
    """Returns the least that a block of so many bytes takes."""
    return round_up(max(nbytes, 1), PAGE)


def rounded(nbytes: int) -> int:
    """Returns the bytes that a block of ``nbytes`` bytes takes: the next multiple of ``PAGE`` (at least one page), or
    for 64 KiB and more at most an eighth more.

    Blocks of nearly the same size then fit into each other's place.
    """
    step = 1 << (nbytes.bit_length() - 4) if nbytes > _FINE else PAGE
    return -(-nbytes // step) * step or step  # round_up, not called
