"""Let go of what was not used for longest: for comparison.

Unlike items are weighed by GreedyDual-Size (Cao and Irani, "Cost-Aware WWW Proxy Caching Algorithms", USITS 1997): at
each use an item gets the credit of the last one that went plus its own seconds / bytes, and who has least goes. Where
sizes and costs are equal, that is the least recently used.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from math import inf

from minato_gpu.caching.orders import Orders
from minato_gpu.caching.policy import PASS, Verdict, check

_SLACK = 1024  # entries of the heap that are out of date, beyond as many as there are items


class Lru:
    """See the module's head; ``budget`` in bytes."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used_bytes = 0
        self._items: dict[int, tuple[int, float]] = {}  # bytes, seconds a byte
        self._entries: dict[int, tuple[float, int, int]] = {}  # credit, number of the use, key
        self._heap: list[tuple[float, int, int]] = []
        self._uses = count()
        self._credit = 0.0  # of the last one that went

    def begin(self, epoch: int, orders: Orders | None, look_ahead: int) -> int:
        return 0  # positions make no difference

    def offer(self, key: int, nbytes: int, cost_s: float, now: int, *, ahead: bool = False) -> Verdict:
        check(nbytes, cost_s)
        old = key in self
        self.dropped(key)
        if nbytes > (self.budget - self.used_bytes if ahead else self.budget):
            return Verdict(False, (key,)) if old else PASS
        going = []
        while nbytes > self.budget - self.used_bytes:
            entry = heappop(self._heap)
            if self._entries.get(entry[2]) is entry:
                self._credit = entry[0]
                self.dropped(entry[2])
                going.append(entry[2])
        self._items[key] = (nbytes, cost_s / nbytes if nbytes else inf)
        self.used_bytes += nbytes
        self.used(key, now)
        return Verdict(True, tuple(going))

    def used(self, key: int, now: int) -> None:
        entry = (self._credit + self._items[key][1], next(self._uses), key)
        self._entries[key] = entry
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._items) + _SLACK:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def dropped(self, key: int) -> None:
        if key in self:
            self.used_bytes -= self._items.pop(key)[0]
            del self._entries[key]

    def __contains__(self, key: int) -> bool:
        return key in self._items

    def __len__(self) -> int:
        return len(self._items)
