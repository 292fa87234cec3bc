"""The policy that keeps what is needed soonest, by the orders of epochs to come.

Belady's rule ("A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 1966), with
bypass: of items of equal size, no policy has more hits. A use that is not known comes after all that are. So without
orders this policy keeps what came first, as ``Minio`` does.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np

from minato_gpu.caching.future import Future, Orders
from minato_gpu.caching.policy import CachePolicy

_SLACK = 1024  # entries of the heap that are out of date, beyond as many as there are items
_GONE = -1  # in place of a position


class NextUse(CachePolicy):
    """Keeps what is needed soonest, of keys 0 to ``keys`` - 1, within ``budget`` bytes."""

    def __init__(self, budget: int, keys: int) -> None:
        super().__init__(budget)
        self._orders: Orders | None = None
        self._epoch = 0
        self._future = Future(keys)
        self._uses = np.full(keys, _GONE)  # position of the next use of each item that is kept
        self._heap: list[tuple[int, int]] = []  # those positions below zero, and keys; also such as are out of date

    def begin(self, epoch: int, orders: Orders | None, look_ahead: int) -> int:
        """Takes the orders of this epoch and of ``look_ahead`` more, up to the first that is not known (``orders``
        None: none is).

        Each order is drawn once, as long as epoch follows epoch and ``orders`` equals those of the epoch before; else
        the tables are made anew. Returns the position of the epoch's first access. Raises ValueError for unknown keys.
        """
        future = self._future
        if orders == self._orders and epoch == self._epoch + 1 and future.epochs:
            future.forget_epoch()
            orders = self._orders  # which may have come further in drawing them
        else:
            self._future = future = Future(future.keys, future.end)
        self._epoch, self._orders = epoch, orders
        while orders is not None and future.epochs <= look_ahead:
            order = orders.order(epoch + future.epochs)
            if order is None:
                break
            future.extend(order)
        self._rank_all()
        return future.start

    def used(self, key: int, now: int) -> None:
        """Ranks a key anew, by its next use after access number ``now``."""
        use = self._future.after(key, now)
        if use != self._uses.item(key):
            self._enter(key, use)

    def _enter(self, key: int, use: int) -> None:
        self._uses[key] = use
        heappush(self._heap, (-use, key))
        if len(self._heap) > 2 * len(self) + _SLACK:
            self._rank_all()

    def _rank_all(self) -> None:
        """Ranks all items by the tables."""
        keys = np.fromiter(self._bytes, np.int64, len(self))
        self._uses[keys] = uses = self._future.next_use[keys]
        self._heap = list(zip((-uses).tolist(), keys.tolist(), strict=True))
        heapify(self._heap)

    def _exchange(self, key: int, short: int, now: int) -> tuple[int, ...] | None:
        """Takes items that are used later than the new one off the heap until ``short`` bytes are free; returns their
        keys.

        Returns None, with the same items kept, if there are not enough. ``now``: position of the access.
        """
        use = self._future.after(key, now)
        going: list[tuple[int, int]] = []
        while short > 0 and (last := self._last()) is not None and -last[0] > use:
            going.append(heappop(self._heap))
            self._uses[last[1]] = _GONE  # there may be a second entry of the same use
            short -= self._bytes[last[1]]
        if short > 0:
            for later, each in going:
                self._enter(each, -later)
            return None
        return tuple(each for _, each in going)

    def _entered(self, key: int, now: int) -> None:
        self._enter(key, self._future.after(key, now))

    def _last(self) -> tuple[int, int] | None:
        """Returns the top of the heap: the item whose next use is last of all. Returns None if nothing is kept."""
        heap = self._heap
        while heap:
            use, key = heap[0]
            if key in self and -use == self._uses.item(key):
                return heap[0]
            heappop(heap)
        return None
