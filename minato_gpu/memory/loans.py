"""Loans: memory that belongs to whoever has a view of it, until the last view dies.

A batch is handed out as tensors over a NumPy array that owns a piece of an arena, and so are the slabs that a place of
the window, a load and its copies share. When the last tensor, view or array that refers to it is gone, the piece
returns to its arena; nothing else may recycle it. The callback can run in any thread at any moment, so it only appends
to a queue that the engine empties. It is no Python function: a Ctrl-C that arrived while one runs would be lost in it.

Small parts of a batch are copied out of it: whoever collects the labels of an epoch keeps the labels, not the pictures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from minato_gpu.memory.arena import Arena

_SMALL = 1 << 16


def apart(part: NDArray[np.uint8], block_bytes: int) -> NDArray[np.uint8]:
    """Returns a part of a lent block as the consumer gets it: a copy if it is small, and small against the block."""
    return part.copy() if is_small(part.nbytes, block_bytes) else part


def is_small(nbytes: int, block_bytes: int) -> bool:
    """Returns whether a part of a batch is so small that it must not keep the whole batch alive."""
    return nbytes <= min(_SMALL, block_bytes // 8)


class _Loan(ref):  # type: ignore[type-arg]
    """A weak reference that remembers which block it watches."""

    __slots__ = ("block", "nbytes")

    block: tuple[int, int]
    nbytes: int


class Loans:
    """Blocks that are lent, and those that came back. A block is (owner, offset); owner -1 is the parent."""

    def __init__(self) -> None:
        self._live: dict[int, _Loan] = {}
        self._dead: deque[_Loan] = deque()
        self._given_back: deque[tuple[int, int]] = deque()

    def allocate(self, arena: Arena, nbytes: int, owner: int = -1) -> tuple[int, NDArray[np.uint8]]:
        """Allocates a block of the owner's arena and lends it. Returns its offset and the array that owns it.

        Raises MemoryError when the arena is full.
        """
        offset = arena.allocate(nbytes)
        return offset, self.lend(arena.buffer, owner, offset, nbytes)

    def lend(self, buffer: memoryview, owner: int, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Returns bytes ``offset`` to ``offset + nbytes`` of an arena as an array, shape (nbytes,), that owns the
        block."""
        # frombuffer, not ndarray(buffer=...): that would refer to the mapping itself, without keeping it from closing
        array = np.frombuffer(buffer, np.uint8, nbytes, offset)
        loan = _Loan(array, self._dead.append)
        loan.block = (owner, offset)
        loan.nbytes = nbytes
        self._live[id(loan)] = loan
        return array

    def give_back(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Gives back blocks that are not needed any more, lent or not."""
        self._given_back.extend(blocks)

    def take_back(self) -> list[tuple[int, int]]:
        """Returns the blocks that came back since the last call."""
        given = self._given_back
        blocks = [given.popleft() for _ in range(len(given))]
        for _ in range(len(self._dead)):
            loan = self._dead.popleft()
            self._live.pop(id(loan), None)  # None: an interrupt came while it was lent
            blocks.append(loan.block)
        return blocks

    def lent_by(self, owner: int) -> list[tuple[int, int]]:
        """Returns offset and bytes of this owner's blocks that have not come back."""
        loans = list(self._live.values())
        return [(loan.block[1], loan.nbytes) for loan in loans if loan.block[0] == owner]

    @property
    def live(self) -> int:
        """Returns how many blocks are lent."""
        return len(self._live) - len(self._dead)
