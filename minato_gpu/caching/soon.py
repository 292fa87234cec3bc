"""The rule of a tier that cannot compare its copies with each other: it keeps what is wanted again soon.

A copy is looked at as it is used, and only then: it stays if its key comes again within so many epochs (``reach`` in
choice.py) after the current one, and goes if it does not; by the same rule what is new is written, if there is room. So
no copy is looked for that might go for a better one, room is made where a copy is used anyhow, and what stays fills the
room just about. A reach of 2.4 epochs is the next two and the first four tenths of the third.

Simulated, that has 0.99 to 1.00 of the hits that are possible (``python -m benchmarks.caches --part equal``). Rejected:
whole epochs (0.86 to 1.00: what comes late in the last one takes the room of what comes sooner); the distance in
accesses (0.87 to 1.00: room is short where epochs meet, see next_use.py).
"""

from __future__ import annotations

from math import ceil

import numpy as np
from numpy.typing import NDArray

from minato_gpu.caching.future import Integers, Orders


class Soon:
    """Knows which of keys 0 to ``keys`` - 1 come again soon after an epoch. Takes two bytes a key, and the orders."""

    def __init__(self, keys: int) -> None:
        self._keys = keys
        self._orders: Orders | None = None
        self._drawn: dict[int, Integers] = {}  # orders by epoch
        self._wanted: dict[int, NDArray[np.bool_]] = {}  # for each key, whether it comes soon after that epoch

    def begin(self, epoch: int, orders: Orders, reach: float) -> bool:
        """Begins an epoch, after which ``reach`` epochs are soon.

        Returns False if an order is not known, or has unknown keys; then every key counts as coming soon. Each order is
        drawn once, as long as ``orders`` stay equal.
        """
        if orders != self._orders:
            self._orders, self._drawn = orders, {}
        self._drawn = {each: order for each, order in self._drawn.items() if each > epoch}
        self._wanted = {each: wanted for each, wanted in self._wanted.items() if each == epoch - 1}
        wanted = np.zeros(self._keys, bool)
        for place in range(ceil(reach)):
            order = self._order(epoch + 1 + place)
            if order is None:
                return False
            wanted[order[: ceil(len(order) * min(reach - place, 1.0))]] = True
        self._wanted[epoch] = wanted
        return True

    def after(self, epoch: int, key: int) -> bool:
        """Returns whether a key comes again soon after that epoch, the current one or the one before.

        True if that is not known.
        """
        wanted = self._wanted.get(epoch)
        return wanted is None or not 0 <= key < self._keys or bool(wanted[key])

    def _order(self, epoch: int) -> Integers | None:
        if epoch not in self._drawn:
            assert self._orders is not None
            order = self._orders.order(epoch)  # of the first that were equal: they may have come further in drawing
            if order is None or not 0 <= int(order.min(initial=0)) <= int(order.max(initial=0)) < self._keys:
                return None
            self._drawn[epoch] = order
        return self._drawn[epoch]
