"""The host's side of the way to devices: an arena, of which they may read a part by themselves: pinned from its
beginning, and further when it is used further.

An arena is a mapping far larger than its memory, so it cannot be pinned whole. It allocates the lowest free extent, so
what is in use lies at its beginning.

Pinned pages are held by the driver. If the arena gave them back to the kernel, as it does with memory that it has not
used lately, the next write would go to fresh pages, and the device would go on reading the old ones without a word; so
an arena keeps what is pinned (``Arena.keep``).
"""

from __future__ import annotations

import contextlib
import os
import threading

import numpy as np
from numpy.typing import NDArray

from minato_gpu.device.accelerator import Accelerator
from minato_gpu.memory.arena import Arena, round_up
from minato_gpu.memory.loans import Loans

_STEP = 16 << 20
_MOST = 256 << 20  # pinned ahead of need at once: it takes the driver a tenth of a second, in which batches wait


class Host:
    """``arena``, its blocks that loads and copies share by ``loans``, and its pinned part, for every device.

    ``accelerator``: any of the devices; what one has pinned, all can read. ``ends``: where the pinned pieces end; a
    copy must not cross one. Every method may be called by any thread. Where the device refuses, nothing more is tried:
    copies still work, by way of the driver's own memory. ``refused`` then says why. ``told``: a descriptor, readable
    once a load has been issued since ``clear``.
    """

    def __init__(self, arena: Arena, loans: Loans, accelerator: Accelerator, step: int = _STEP) -> None:
        self.ends: list[int] = []
        self.refused: str | None = None
        self.arena = arena
        self._loans = loans
        self._accelerator = accelerator
        self._step = step
        self._lock = threading.Lock()
        self.told = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._address = int(np.frombuffer(arena.buffer, np.uint8).__array_interface__["data"][0])

    def allocate(self, nbytes: int) -> tuple[int, NDArray[np.uint8]]:
        """The offset of a new block, and the array that owns it."""
        return self._loans.allocate(self.arena, nbytes)

    def clear(self) -> None:
        """Make ``told`` unreadable again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.told)

    @property
    def pinned(self) -> int:
        """Bytes pinned."""
        return max(self.ends, default=0)  # asked once: another thread may be closing it

    def cover(self, end: int) -> None:
        """Pin the arena up to offset ``end``, or twice as far as before within reason, so that pieces stay few."""
        with self._lock:
            begin = self.pinned
            if begin < end and self.refused is None:
                self._pin(begin, end)

    def _pin(self, begin: int, end: int) -> None:
        ahead = min(2 * begin, begin + _MOST)
        upto = min(round_up(max(end, ahead), self._step), self.arena.capacity)
        self.arena.keep(upto)  # before: what is given back between the two would be pinned elsewhere
        try:
            self._accelerator.pin(self._address + begin, upto - begin)
        except RuntimeError as error:
            self.refused = str(error)
            self.arena.keep(begin)
            return
        self.ends.append(upto)

    def close(self) -> None:
        """Unpin; nothing may read the arena any more. What a device refuses that is lost, nobody needs. Idempotent."""
        begins, self.ends = [0, *self.ends[:-1]][: len(self.ends)], []
        for begin in begins:
            with contextlib.suppress(RuntimeError):
                self._accelerator.unpin(self._address + begin)
        if self.told >= 0:
            os.close(self.told)
            self.told = -1
