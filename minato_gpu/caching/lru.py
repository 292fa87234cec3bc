"""The policy that evicts what was not used for longest, for comparison.

Unlike items are weighed by GreedyDual-Size (Cao and Irani, "Cost-Aware WWW Proxy Caching Algorithms", USITS 1997): at
each use an item gets the credit of the last one that went plus its own seconds / bytes, and who has least goes. Where
sizes and costs are equal, that is the least recently used.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count

from minato_gpu.caching.policy import CachePolicy

_SLACK = 1024  # entries of the heap that are out of date, beyond as many as there are items


class Lru(CachePolicy):
    """Evicts what was not used for longest; ``budget`` in bytes."""

    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self._earns: dict[int, float] = {}  # seconds a byte
        self._entries: dict[int, tuple[float, int, int]] = {}  # credit, number of the use, key
        self._heap: list[tuple[float, int, int]] = []
        self._uses = count()
        self._credit = 0.0  # of the last one that went

    def used(self, key: int, now: int) -> None:
        entry = (self._credit + self._earns[key], next(self._uses), key)
        self._entries[key] = entry
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self) + _SLACK:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def dropped(self, key: int) -> None:
        super().dropped(key)
        self._entries.pop(key, None)

    def _exchange(self, key: int, short: int, earns: float, now: int) -> tuple[int, ...]:
        going = []
        while short > 0:
            entry = heappop(self._heap)
            if self._entries.get(entry[2]) is entry:
                self._credit = entry[0]
                short -= self._bytes[entry[2]]
                going.append(entry[2])
        return tuple(going)

    def _entered(self, key: int, earns: float, now: int) -> None:
        self._earns[key] = earns
        self.used(key, now)
