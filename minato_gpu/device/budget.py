"""Device bytes: what executors hold, what they made and no batch has taken, batches that the consumer has not (P4).

The batch that is due next may always be made, so that a budget smaller than one batch slows a loader down and never
stops it: its bytes are set aside until it is. An executor may always make one sample, which goes to host memory where
there is no room for it. So the peak is at most the budget, or one batch where that is more, and one sample for each
executor, and the one row of a batch that has lost all of its own. (What a stage needs while it runs is the executors'
own; see ``limit`` in ``lanes/device.py``.)
"""

from __future__ import annotations

import threading
from collections import deque


class DeviceBudget:
    """The account of one device. ``limit`` in bytes, None for none. Every method may be called by any thread.

    ``batches``: the limit follows from their size, as soon as that is known: so many of them. Nobody has named bytes
    that must not be exceeded then, so it is ``elastic``: what there is no room for may be made as a whole before it
    goes to the host. ``aside``: bytes that ``take_some`` leaves alone. ``give`` takes no lock: it is called when the
    last reference to something dies, which may be at any moment.
    """

    def __init__(self, limit: int | None, batches: int = 0) -> None:
        self.limit = limit
        self._batches = batches
        self.aside = 0
        self._peak = 0
        self._held: dict[str, int] = {}
        self._given: deque[tuple[str, int]] = deque()
        self._lock = threading.Lock()

    def take(self, kind: str, nbytes: int) -> None:
        """``nbytes`` more of this kind ("samples", "batches") are held, whether they fit or not."""
        with self._lock:
            self._add(self._settled(), kind, nbytes)

    def take_some(self, kind: str, each: int, most: int) -> int:
        """Take the bytes of as many things of ``each`` bytes as there is room for, at most ``most``; how many."""
        with self._lock:
            held = self._settled()
            if self.limit is not None and each > 0:
                most = min(most, max(0, self._free(self.limit, held)) // each)
            self._add(held, kind, most * each)
            return most

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes could be taken by ``take_some``."""
        with self._lock:
            return self.limit is None or nbytes <= self._free(self.limit, self._settled())

    @property
    def elastic(self) -> bool:
        """Whether the limit is no promise, nor all that the device has."""
        return self._batches > 0

    def follow(self, batch_bytes: int) -> None:
        """A batch takes so many bytes."""
        with self._lock:
            if self._batches:
                self.limit = self._batches * batch_bytes

    def lower(self, limit: int) -> None:
        """The device has turned out to have less memory: no more than this is to be held from now on."""
        with self._lock:
            self._batches = 0
            self.limit = limit if self.limit is None else min(self.limit, limit)

    def give(self, kind: str, nbytes: int) -> None:
        """They are not any more."""
        self._given.append((kind, nbytes))

    @property
    def held(self) -> dict[str, int]:
        """Bytes by kind."""
        with self._lock:
            return dict(self._settled())

    @property
    def peak(self) -> int:
        """The most bytes that were held at once."""
        return self._peak

    def _add(self, held: dict[str, int], kind: str, nbytes: int) -> None:
        held[kind] = held.get(kind, 0) + nbytes
        self._peak = max(self._peak, sum(held.values()))

    def _free(self, limit: int, held: dict[str, int]) -> int:
        """Bytes that are neither held nor set aside."""
        return limit - self.aside - sum(held.values())

    def _settled(self) -> dict[str, int]:
        for _ in range(len(self._given)):
            kind, nbytes = self._given.popleft()
            self._held[kind] -= nbytes
        return self._held
