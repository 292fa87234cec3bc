"""Counts the bytes that the loader holds on one device, by kind: samples in no batch yet, and batches not taken (P4).

The batch that the device delivers next may always be loaded, so a budget smaller than a batch slows the loader down but
never stops it; its bytes are reserved until then. An executor may always make one sample, which goes to host memory
where there is no room. The peak is thus at most the budget (or one batch, if larger), plus one sample per executor,
plus one row of a batch that lost all of its own. Memory that a stage needs while it runs is not counted.
"""

from __future__ import annotations

import threading
from collections import deque


class DeviceBudget:
    """Account of one device's bytes; every method may be called by any thread.

    ``give`` takes no lock, because finalizers call it at any moment.

    Args:
        limit: bytes; None for no limit.
        batches: sets the limit to this many batches once their size is known. Such a budget is ``elastic``, since no
            limit in bytes was given: a micro-batch without room may be made as a whole before it goes to the host.
    """

    def __init__(self, limit: int | None, batches: int = 0) -> None:
        self.limit = limit
        self._batches = batches
        self.reserved = 0  # bytes that ``take_some`` leaves free, for the next batch
        self.peak = 0  # the most bytes that were held at once
        self._held: dict[str, int] = {}
        self._freed: deque[tuple[str, int]] = deque()  # not yet subtracted from ``_held``
        self._lock = threading.Lock()

    def take(self, kind: str, nbytes: int) -> None:
        """Counts ``nbytes`` more of this kind ("samples", "batches"), whether they fit or not."""
        with self._lock:
            self._add(self._settled(), kind, nbytes)

    def take_some(self, kind: str, each: int, most: int) -> int:
        """Counts up to ``most`` things of ``each`` bytes, as many as there is room for; returns how many."""
        with self._lock:
            held = self._settled()
            if self.limit is not None and each > 0:
                most = min(most, max(0, self._free(self.limit, held)) // each)
            self._add(held, kind, most * each)
            return most

    def has_room(self, nbytes: int) -> bool:
        """Returns whether ``take_some`` could take this many bytes."""
        with self._lock:
            return self.limit is None or nbytes <= self._free(self.limit, self._settled())

    @property
    def elastic(self) -> bool:
        """True while the limit follows the batches' size and may be exceeded for a moment."""
        return self._batches > 0

    def follow(self, batch_bytes: int) -> None:
        """Sets the limit of an elastic budget to ``batches`` times ``batch_bytes``; leaves that of any other as it
        is."""
        with self._lock:
            if self._batches:
                self.limit = self._batches * batch_bytes

    def lower(self, limit: int) -> None:
        """Lowers the limit, because the device has less memory than thought; the budget is elastic no more."""
        with self._lock:
            self._batches = 0
            self.limit = limit if self.limit is None else min(self.limit, limit)

    def give(self, kind: str, nbytes: int) -> None:
        """Frees ``nbytes`` of this kind."""
        self._freed.append((kind, nbytes))

    @property
    def held(self) -> dict[str, int]:
        """Bytes held, by kind."""
        with self._lock:
            return dict(self._settled())

    def _add(self, held: dict[str, int], kind: str, nbytes: int) -> None:
        held[kind] = held.get(kind, 0) + nbytes
        self.peak = max(self.peak, sum(held.values()))

    def _free(self, limit: int, held: dict[str, int]) -> int:
        """Returns the bytes that are neither held nor reserved."""
        return limit - self.reserved - sum(held.values())

    def _settled(self) -> dict[str, int]:
        for _ in range(len(self._freed)):
            kind, nbytes = self._freed.popleft()
            self._held[kind] -= nbytes
        return self._held
