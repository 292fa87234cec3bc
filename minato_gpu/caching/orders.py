"""Orders of accesses to come, and one rank's share of an order."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from minato_gpu.caching.future import Integers


class Orders(Protocol):
    """The orders of a tier's epochs, in the tier's keys.

    Two that are equal give the same orders (they compare seed, rank, ranks and all else that the orders depend on):
    what was made of one serves the other.
    """

    def order(self, epoch: int) -> Integers | None:
        """Returns the keys of the epoch's accesses, shape (accesses,); None if they cannot be known."""


def share(order: Integers, rank: int, ranks: int, *, drop_last: bool = False) -> Integers:
    """Returns what one of several ranks reads of an epoch's order, as torch's ``DistributedSampler`` shares it out.

    All ranks read equally many: the order goes on from its beginning, or its end is dropped.
    """
    count = len(order) // ranks if drop_last else -(-len(order) // ranks)
    return np.resize(order, count * ranks)[rank::ranks]
