"""Orders of accesses: what is known of those to come, one rank's share, and what several ranks read together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from minato_gpu.caching.future import Integers


class Orders(Protocol):
    """The orders of a tier's epochs, in the tier's keys.

    Two that are equal give the same orders (they compare seed, rank, ranks and all else that the orders depend on):
    what was made of one serves the other.
    """

    def order(self, epoch: int) -> Integers | None:
        """The keys of the epoch's accesses, shape (accesses,); None where it cannot be known."""


class Part(NamedTuple):
    """What a rank reads: ``rank``'s share of the epoch that all ranks of the ``job`` (a digest) know by this number."""

    job: bytes
    rank: int
    epoch: int


@runtime_checkable
class RankOrders(Orders, Protocol):
    """The orders of one of several ranks that share out each epoch, which knows those of the others, too."""

    def part(self, epoch: int) -> Part:
        """What it reads in an epoch. Ranks with equal jobs share out the same epochs."""

    def beside(self, ranks: Collection[int]) -> Orders:
        """What it reads together with these other ranks."""


def share(order: Integers, rank: int, ranks: int, *, drop_last: bool = False) -> Integers:
    """What one of several ranks reads of an epoch's order, as torch's ``DistributedSampler`` shares it out.

    All ranks read equally many: the order goes on from its beginning, or its end is dropped.
    """
    count = len(order) // ranks if drop_last else -(-len(order) // ranks)
    return np.resize(order, count * ranks)[rank::ranks]


def merged(orders: Sequence[Integers], step: int) -> Integers:
    """The accesses of ranks that take steps of ``step`` samples side by side, lower ranks first.

    For ranks that share one directory: together they read the whole set each epoch.
    """
    steps = np.concatenate([np.arange(len(order)) // step for order in orders])
    return np.concatenate(orders)[np.argsort(steps, kind="stable")]
