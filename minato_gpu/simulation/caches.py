"""Caches under simulated epochs: the production policies, and the most hits that any policy could have.

Hosts with directories of their own read a share each of every epoch, as torch's ``DistributedSampler`` deals it out; one
of them is simulated. A host alone, or several ranks on one directory, read the whole set each epoch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minato_gpu.caching.choice import look_ahead
from minato_gpu.caching.future import Integers
from minato_gpu.caching.lru import Lru
from minato_gpu.caching.minio import Minio
from minato_gpu.caching.next_use import NextUse
from minato_gpu.caching.orders import share
from minato_gpu.caching.policy import Policy

POLICIES = ("lru", "minio", "next-use")


@dataclass(frozen=True)
class Shuffles:
    """The orders of the first of ``shards`` hosts that share a set of ``keys`` items."""

    keys: int
    shards: int
    seed: int

    def order(self, epoch: int) -> Integers:
        shuffled = np.random.default_rng((self.seed, epoch)).permutation(self.keys)
        return share(shuffled, 0, self.shards)


@dataclass(frozen=True)
class Items:
    """What a miss of each key costs, in bytes and seconds, each of shape (keys,)."""

    nbytes: Integers
    costs_s: np.ndarray[tuple[int], np.dtype[np.float64]]

    @classmethod
    def equal(cls, keys: int) -> Items:
        return cls(np.full(keys, 100_000), np.full(keys, 0.05))


def hits(policy: str, orders: Shuffles, items: Items, cache_share: float, epochs: int) -> list[Integers]:
    """The keys that were hit in each epoch, by the production policy with the look-ahead that suffices."""
    budget = int(cache_share * int(items.nbytes.sum()))
    if policy == "next-use":
        kept = NextUse(budget, orders.keys)
        ahead = look_ahead(orders.shards, cache_share)
        return [_epoch(kept, orders.order(epoch), items, kept.begin(epoch, orders, ahead)) for epoch in range(epochs)]
    others: dict[str, Policy] = {"lru": Lru(budget), "minio": Minio(budget)}
    return [_epoch(others[policy], orders.order(epoch), items, 0) for epoch in range(epochs)]


def _epoch(policy: Policy, order: Integers, items: Items, start: int) -> Integers:
    """The keys that are hit in an epoch that begins at position ``start``."""
    hit = []
    nbytes, costs = items.nbytes.tolist(), items.costs_s.tolist()
    for now, key in enumerate(order.tolist(), start):
        if key in policy:
            policy.used(key, now)
            hit.append(key)
        else:
            policy.offer(key, nbytes[key], costs[key], now)
    return np.array(hit, np.int64)


def most_hits(orders: Sequence[Integers], capacity: int) -> list[int]:
    """The hits of each epoch of Belady's rule with bypass, which knows all of the orders; items of equal size.

    Found without any cache: between two uses an item takes one of ``capacity`` places, or the second use is a miss. That
    is scheduling intervals on machines. Taken by their ends, each goes to the place that has been free for the least
    time, if one is free: the most intervals that can be had, of every beginning of the orders, too (Faigle and Nawijn,
    "Note on scheduling intervals on-line", Discrete Applied Mathematics 1995).
    """
    free = [-1] * capacity  # since when each place is, rising
    last: dict[int, int] = {}
    counts, now = [], 0
    for order in orders:
        found = 0
        for key in order.tolist():
            place = bisect_right(free, last.get(key, -2)) - 1
            if place >= 0:
                del free[place]
                free.append(now)
                found += 1
            last[key] = now
            now += 1
        counts.append(found)
    return counts
