"""The board: a page of shared memory on which every worker shows what it is doing, without a message.

One row of 64-bit words per worker. A worker writes CHUNK, STARTED, SINCE_NS; the parent writes LIMIT to take
samples back that have not started. It writes HAND, the number of a chunk whose samples are to be handed over to another
lane at the next stage where they can be cut: a wish, which needs no hand-shake. For LIMIT the hand-shake is Dekker's: a
worker writes STARTED, then reads LIMIT; the parent writes LIMIT, then reads STARTED; a lock operation between the two
(a full fence on the processors that PyTorch supports) makes sure that at least one of them sees the other.

Each worker also has a ring of offsets in its own arena that the parent has freed: written by the parent at TAIL,
taken by the worker at HEAD.
"""

from __future__ import annotations

import mmap
import os
import threading

CHUNK, STARTED, LIMIT, SINCE_NS, HEAD, TAIL, RUN, HAND = range(8)
_ROW = 16
_RING = 1 << 14
NO_LIMIT = 1 << 62
ATTENTION = 0
_HEADER = 8


class Board:
    """Shared words; see the module's head for who writes what."""

    def __init__(self, workers: int, fd: int | None = None) -> None:
        nbytes = 8 * (_HEADER + workers * (_ROW + _RING))
        self.workers = workers
        self.fd = os.memfd_create("minato-board", os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, nbytes)
        self._map = mmap.mmap(self.fd, nbytes)
        self.words = memoryview(self._map).cast("q")
        self.barrier = threading.Lock()  # taking and releasing it is a full memory barrier
        if fd is None:
            for worker in range(workers):
                self.words[self.row(worker) + CHUNK] = self.words[self.row(worker) + HAND] = -1

    def row(self, worker: int) -> int:
        """Index of the first word of the worker's row."""
        return _HEADER + worker * (_ROW + _RING)

    def fence(self) -> None:
        """A full memory barrier."""
        with self.barrier:
            pass

    # --- parent -------------------------------------------------------------------------------------------

    def find(self, run: int, chunk: int) -> int | None:
        """The worker that works on the chunk, or None when none has taken it (or it is through)."""
        for worker in range(self.workers):
            row = self.row(worker)
            if self.words[row + CHUNK] == chunk and self.words[row + RUN] == run:
                return worker
        return None

    def all_busy(self) -> bool:
        """Whether every worker is at a chunk, and so will look at ATTENTION once more."""
        return all(self.words[self.row(worker) + CHUNK] >= 0 for worker in range(self.workers))

    def revoke(self, worker: int, chunk: int, keep: int) -> int | None:
        """Stop the worker before sample ``keep`` of the chunk; returns where it really stops, None if too late."""
        row = self.row(worker)
        self.words[row + LIMIT] = keep
        self.fence()
        if self.words[row + CHUNK] != chunk:
            return None
        return max(keep, self.words[row + STARTED])

    def hand_over(self, run: int, chunk: int) -> None:
        """Ask the worker that is at the chunk, if any, to hand its current sample over at the next cut."""
        worker = self.find(run, chunk)
        if worker is not None:
            self.words[self.row(worker) + HAND] = chunk

    def give_back(self, worker: int, offset: int) -> bool:
        """Tell the worker that a block of its arena is free; False when the ring is full (try again later)."""
        row = self.row(worker)
        tail = self.words[row + TAIL]
        if tail - self.words[row + HEAD] >= _RING:
            return False
        self.words[row + _ROW + tail % _RING] = offset
        self.words[row + TAIL] = tail + 1
        return True

    # --- worker -------------------------------------------------------------------------------------------

    def returned(self, worker: int) -> list[int]:
        """Offsets freed by the parent since the last call."""
        row = self.row(worker)
        head, tail = self.words[row + HEAD], self.words[row + TAIL]
        if head == tail:
            return []
        ring = row + _ROW
        offsets = [self.words[ring + i % _RING] for i in range(head, tail)]
        self.words[row + HEAD] = tail
        return offsets

    def close(self) -> None:
        """Unmap; the memory goes with the last process that maps it."""
        self.words.release()
        self._map.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
