"""The policy that keeps what is needed soonest, by the orders of epochs to come.

For items of equal size and cost this is Belady's rule ("A study of replacement algorithms for a virtual-storage
computer", IBM Systems Journal 1966) with bypass: no policy has more hits. Unlike items are ranked by value: seconds
that a miss costs / bytes / epochs until the next use; items of equal value are ranked by the next use.

Epochs are counted by the boundaries between now and the use, plus a half. Simulated with unlike sizes and costs, that
saves more than the distance in accesses (one reader, a quarter of the set: 0.62 of the seconds against 0.56). For an
item must be there at every boundary before its use, and that is where room is short: of one reader, every item crosses
one, however far it has to go. Values then change within an epoch only for the item that is used. Of a key
whose next use is not known it is assumed that it comes a mean interval after all that is known. Without any orders this
policy thus keeps what is dear for its size, and of items that are alike those that came first, as ``Minio`` does.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import nan

import numpy as np

from minato_gpu.caching.future import NEVER, Future
from minato_gpu.caching.orders import Orders
from minato_gpu.caching.policy import CachePolicy

_HALF = 0.5  # epoch, on average, to a use before the next boundary
_TIE = 1e-9  # epochs for each access: orders the uses between two boundaries, and is lost in all else
_SLACK = 1024  # entries of the heap that are out of date, beyond as many as there are items


class NextUse(CachePolicy):
    """Keeps what is needed soonest, of keys 0 to ``keys`` - 1, within ``budget`` bytes."""

    def __init__(self, budget: int, keys: int) -> None:
        super().__init__(budget)
        self._orders: Orders | None = None
        self._epoch = 0
        self._future = Future(keys)
        self._unknown = 1.0  # epochs to a use that is not known
        self._earns = np.zeros(keys)  # seconds that a miss costs, per byte
        self._values = np.zeros(keys)  # seconds per byte and epoch until the next use
        self._heap: list[tuple[float, int]] = []  # values and keys; also such as are out of date

    def begin(self, epoch: int, orders: Orders | None, look_ahead: int) -> int:
        """Takes the orders of this epoch and of ``look_ahead`` more.

        Each order is drawn once, as long as epoch follows epoch and ``orders`` equals those of the epoch before; else
        the tables are made anew. Returns the position of the epoch's first access.
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
        interval = future.keys * future.epochs / max(future.end - future.start, 1)  # epochs between uses of a key
        self._unknown = future.epochs + interval + _HALF
        self._revalue()
        return future.start

    def used(self, key: int, now: int) -> None:
        """Ranks a key anew, by its next use after access number ``now``."""
        value = self._value(self._earns.item(key), self._future.after(key, now))
        if value != self._values.item(key):
            self._enter(key, value)

    def _value(self, earns: float, use: int) -> float:
        """Returns an item's value: seconds per byte and epoch that it is kept until its use, at position ``use``."""
        if use == NEVER:
            return earns / self._unknown
        return earns / (self._future.epoch(use) + _HALF + _TIE * (use - self._future.start))

    def _enter(self, key: int, value: float) -> None:
        self._values[key] = value
        heappush(self._heap, (value, key))
        if len(self._heap) > 2 * len(self) + _SLACK:
            self._revalue()

    def _revalue(self) -> None:
        """Computes all values anew. A sorted list is a heap."""
        keys = np.fromiter(self._bytes, np.int64, len(self))
        uses, starts = self._future.next_use[keys], self._future.starts
        away = np.searchsorted(starts, uses, side="right") - 1 + _HALF + _TIE * (uses - starts[0])
        away[uses == NEVER] = self._unknown
        self._values[keys] = values = self._earns[keys] / away
        order = np.argsort(values)
        self._heap = list(zip(values[order].tolist(), keys[order].tolist(), strict=True))

    def _exchange(self, key: int, short: int, earns: float, now: int) -> tuple[int, ...] | None:
        """Takes items of less value than the new one off the heap until ``short`` bytes are free, and returns them.

        Returns None, with nothing changed, if there are not enough. ``now``: position of the access.
        """
        value = self._value(earns, self._future.after(key, now))
        going: list[tuple[float, int]] = []
        while short > 0 and (least := self._least()) is not None and least[0] < value:
            going.append(heappop(self._heap))
            self._values[least[1]] = nan  # there may be a second entry of the same value
            short -= self._bytes[least[1]]
        if short > 0:
            for least_value, each in going:
                self._enter(each, least_value)
            return None
        return tuple(each for _, each in going)

    def _entered(self, key: int, earns: float, now: int) -> None:
        self._earns[key] = earns
        self._enter(key, self._value(earns, self._future.after(key, now)))

    def _least(self) -> tuple[float, int] | None:
        """Returns the least value of all kept keys, and its key: the heap's top. Returns None if nothing is kept."""
        heap = self._heap
        while heap:
            value, key = heap[0]
            if key in self and value == self._values.item(key):
                return heap[0]
            heappop(heap)
        return None
