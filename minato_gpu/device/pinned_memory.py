"""Pins the host arena for devices: from its beginning, and further as more of it is used.

The arena's mapping is far larger than its memory, so it cannot be pinned as a whole. The arena allocates the lowest
free extent, so what is in use is at its beginning.

The driver holds pinned pages. If the arena returned them to the kernel, as it does with memory unused for a while,
later writes would go to new pages while the device kept reading the old ones. So pinned memory is kept
(``Arena.keep``).
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

_STEP = 16 << 20  # bytes; a pinned piece ends at a multiple of it
_MOST = 256 << 20  # bytes pinned ahead of need at once: takes 0.1 s, during which batches wait


class PinnedArena:
    """The host arena as devices see it: its pinned part, and blocks that copies to and from devices use. Thread-safe.

    Where a device refuses to pin, nothing more is tried; copies then go through the driver's own buffer.
    """

    def __init__(self, arena: Arena, loans: Loans, accelerator: Accelerator, step: int = _STEP) -> None:
        self.ends: list[int] = []  # offsets at which pinned pieces end; no copy may cross one
        self.refused: str | None = None  # why a device refused to pin
        self.arena = arena
        self._loans = loans
        self._accelerator = accelerator  # any of the devices: what one has pinned, all can read
        self._step = step
        self._lock = threading.Lock()
        # an eventfd: readable once the copies of a batch to a device have been issued, or refused, or a device that is
        # out of memory asks for room (``Transfers``)
        self.issued_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._address = int(np.frombuffer(arena.buffer, np.uint8).__array_interface__["data"][0])

    def allocate(self, nbytes: int) -> tuple[int, NDArray[np.uint8]]:
        """Returns the offset of a new block in the arena, and the array that owns it: uint8 (nbytes,)."""
        return self._loans.allocate(self.arena, nbytes)

    def clear(self) -> None:
        """Resets ``issued_fd``, the event descriptor that tells the consumer: a batch's copies to a device have been
        issued or refused, or a device is out of memory and wants room. It is readable again at the next of these."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.issued_fd)

    @property
    def pinned(self) -> int:
        """Pinned bytes, from the arena's beginning."""
        return max(self.ends, default=0)  # read once: another thread may be closing

    def cover(self, end: int) -> None:
        """Pins the arena up to offset ``end`` at least.

        So that pieces stay few, it pins up to twice as far as before (at most ``_MOST`` bytes further).
        """
        with self._lock:
            begin = self.pinned
            if begin < end and self.refused is None:
                self._pin(begin, end)

    def _pin(self, begin: int, end: int) -> None:
        ahead = min(2 * begin, begin + _MOST)
        upto = min(round_up(max(end, ahead), self._step), self.arena.capacity)
        self.arena.keep(upto)  # before pinning, so that no page is given back between
        try:
            self._accelerator.pin(self._address + begin, upto - begin)
        except RuntimeError as error:
            self.refused = str(error)
            self.arena.keep(begin)
            return
        self.ends.append(upto)

    def close(self) -> None:
        """Unpins everything and closes ``issued_fd``. No copy to or from a device may be under way; the host may still
        use the arena. Errors of unpinning are ignored. Idempotent."""
        begins, self.ends = [0, *self.ends[:-1]][: len(self.ends)], []
        for begin in begins:
            with contextlib.suppress(RuntimeError):
                self._accelerator.unpin(self._address + begin)
        if self.issued_fd >= 0:
            os.close(self.issued_fd)
            self.issued_fd = -1
