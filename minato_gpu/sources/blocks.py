"""Blocks of shared memory that hold what was read: written by the reader process, copied by workers.

A block begins with a *stamp*, a number that no other block ever has, and its bytes follow. The reader writes the stamp
last, and wipes it before the block's memory is used again. A worker looks at the stamp before and after its copy: a
block that has been given to something else is never taken for what it was, whoever has died meanwhile.

Workers copy from the arena's mapping (measured, 100 KB that no cache of the processor has: 16 µs, or 25 where a worker
sees the memory for the first time, since the kernel maps 16 pages with each fault; by ``preadv`` 28). Tools that add up
the resident memory of processes count what is shared in each of them.
"""

from __future__ import annotations

import os
from itertools import count
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from minato_gpu.memory.arena import Arena, rounded

_STAMP = Struct("Q")  # of this machine's byte order: it is stored as one word
HEAD = _STAMP.size
WIPED = 0
NOWHERE = -1  # in the place of a block: there are no bytes
IN_PAGE_CACHE = -2  # and there are, where the kernel keeps the file's (page_cache.py)
ASKED = -3  # the worker is asked for them: they are fields that it makes


def space_of(nbytes: int) -> int:
    """Returns how many bytes of the arena a block for ``nbytes`` bytes takes."""
    return rounded(HEAD + nbytes)


class Blocks:
    """Allocates, stamps and frees blocks of the arena, on the reader process's side. Any thread may call it."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._stamps = count(int.from_bytes(os.urandom(6)) + 1)  # an arena outlives a reader that was killed

    def allocate(self, nbytes: int) -> tuple[int, memoryview]:
        """Returns the offset of a block for ``nbytes`` bytes, which has no stamp yet, and the memory to write them to.

        Raises MemoryError when the arena is full.
        """
        block, buffer = self._arena.allocate(HEAD + nbytes), self._arena.buffer
        _STAMP.pack_into(buffer, block, WIPED)
        return block, buffer[block + HEAD : block + HEAD + nbytes]

    def view(self, block: int, nbytes: int) -> memoryview:
        """Returns a view, not a copy, of a block's ``nbytes`` bytes."""
        return self._arena.buffer[block + HEAD : block + HEAD + nbytes]

    def publish(self, block: int) -> int:
        """Stamps a block whose bytes are complete, unless it has a stamp already; returns its stamp."""
        (stamp,) = _STAMP.unpack_from(self._arena.buffer, block)
        if stamp == WIPED:
            stamp = next(self._stamps)
            self._stamp(block, stamp)
        return int(stamp)

    def free(self, block: int) -> None:
        """Wipes the stamp of a block, and frees its memory."""
        self._stamp(block, WIPED)
        self._arena.free(block)

    def trim(self) -> None:
        """Gives the memory of all free blocks back to the system."""
        self._arena.trim()

    def _stamp(self, block: int, stamp: int) -> None:
        _STAMP.pack_into(self._arena.buffer, block, stamp)


def copy(arena: Arena, block: int, nbytes: int, stamp: int) -> NDArray[np.uint8] | None:
    """Returns a copy of the block's bytes; None if the block is another one by now.

    Any process that has the arena may call it.
    """
    wanted = _STAMP.pack(stamp)
    if os.pread(arena.fd, HEAD, block) != wanted:  # of memory that has been given back it would take a page to look
        return None
    data = np.empty(nbytes, np.uint8)
    data.data[:] = arena.buffer[block + HEAD : block + HEAD + nbytes]
    return data if os.pread(arena.fd, HEAD, block) == wanted else None
