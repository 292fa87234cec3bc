"""Device bytes: what executors hold, what they made and no batch has taken, batches that the consumer has not (P4).

The batch that the consumer needs next may always be made, so that a budget smaller than one batch slows a loader down
and never stops it. What executors make beyond the budget lies in host memory instead.
"""

from __future__ import annotations

import threading
from collections import deque


class DeviceBudget:
    """The account of one device. ``limit`` in bytes, None for none. Every method may be called by any thread.

    ``give`` takes no lock: it is called when the last reference to something dies, which may be at any moment.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._peak = 0
        self._held: dict[str, int] = {}
        self._given: deque[tuple[str, int]] = deque()
        self._lock = threading.Lock()

    def take(self, kind: str, nbytes: int) -> None:
        """``nbytes`` more of this kind ("executors", "samples", "batches") are held, whether they fit or not."""
        with self._lock:
            held = self._settled()
            held[kind] = held.get(kind, 0) + nbytes
            self._peak = max(self._peak, sum(held.values()))

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

    @property
    def free(self) -> int | None:
        """Bytes left, not below 0; None without a limit."""
        return None if self.limit is None else max(0, self.limit - sum(self.held.values()))

    def fits(self, nbytes: int) -> bool:
        """Whether so many bytes are left."""
        free = self.free
        return free is None or nbytes <= free

    def _settled(self) -> dict[str, int]:
        for _ in range(len(self._given)):
            kind, nbytes = self._given.popleft()
            self._held[kind] -= nbytes
        return self._held
