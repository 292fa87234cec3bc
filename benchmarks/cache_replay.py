"""Caches under simulated epochs: the production policies, and the most hits that any policy could have.

Hosts with directories of their own each read a share of every epoch, as torch's ``DistributedSampler`` shares it out;
one of them is simulated. A host alone, or several ranks on one directory, read the whole set each epoch. Other samplers
draw with replacement, by weights or evenly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minato_gpu.caching.choice import look_ahead, reach
from minato_gpu.caching.future import Integers, Orders, share
from minato_gpu.caching.next_use import NextUse
from minato_gpu.caching.policy import CachePolicy, Minio
from minato_gpu.caching.soon import Soon
from minato_gpu.sources.disk import LEAST_BUDGET
from minato_gpu.sources.disk.entry import disk_space_of

POLICIES = ("minio", "next-use")
ON_DISK = "soon"  # what a tier on disk keeps: see caching/soon.py
BLIND = "next-use without orders"
MISLED = "next-use, wrong about epochs to come"


@dataclass(frozen=True)
class Shuffles:
    """The orders of the first of ``shards`` ranks that share out a set of ``keys`` samples."""

    keys: int
    shards: int
    seed: int

    def order(self, epoch: int) -> Integers:
        """Returns the keys of an epoch, in their order."""
        shuffled = np.random.default_rng((self.seed, epoch)).permutation(self.keys)
        return share(shuffled, 0, self.shards)


@dataclass(frozen=True)
class Draws:
    """The orders of a sampler that draws as many of ``keys`` items as there are, with replacement: by log-normal
    weights of this ``sigma``, evenly where that is 0."""

    keys: int
    sigma: float
    seed: int
    shards = 1

    def order(self, epoch: int) -> Integers:
        weights = np.random.default_rng(self.seed).lognormal(0.0, self.sigma, self.keys)
        return np.random.default_rng((self.seed, epoch)).choice(self.keys, self.keys, p=weights / weights.sum())


@dataclass(frozen=True)
class _Misled:
    """What is foretold in epoch ``now`` of a generator that others draw from as well."""

    orders: Shuffles | Draws
    now: int

    def order(self, epoch: int) -> Integers:
        return self.orders.order(epoch if epoch == self.now else 1_000_000 * self.now + epoch)


def replay(policy: str, orders: Shuffles | Draws, cache_share: float, epochs: int) -> list[Integers]:
    """The keys that are hit in each epoch, by the production policy with the look-ahead that suffices.

    ``cache_share``: how many items there is room for, as a share of the whole set.
    """
    if policy == ON_DISK:
        return replay_on_disk(orders, orders.keys, cache_share, epochs, orders.shards)
    kept = policy_of(policy, int(cache_share * orders.keys), orders.keys)
    ahead = look_ahead(orders.shards, cache_share, once=not isinstance(orders, Draws))
    found = []
    for epoch in range(epochs):
        known: Orders | None = {BLIND: None, MISLED: _Misled(orders, epoch)}.get(policy, orders)
        start = kept.begin(epoch, known, ahead)
        found.append(run_epoch(kept, orders.order(epoch), start))
    return found


def policy_of(name: str, room: int, keys: int) -> CachePolicy:
    """A policy with room for so many items of one byte."""
    return Minio(room) if name == "minio" else NextUse(room, keys)


def replay_on_disk(orders: Orders, keys: int, cache_share: float, epochs: int, shards: float) -> list[Integers]:
    """The same of a tier on disk, by the rule that runs in production."""
    soon = Soon(keys)
    kept: set[int] = set()
    room = int(cache_share * keys)
    found = []
    for epoch in range(epochs):
        order, hit = orders.order(epoch), []
        assert order is not None
        soon.begin(epoch, orders, reach(shards, cache_share))
        for key in order.tolist():
            stays = soon.after(epoch, key)
            if key in kept:
                hit.append(key)
                if not stays:
                    kept.remove(key)
            elif stays and len(kept) < room:
                kept.add(key)
        found.append(np.array(hit, np.int64))
    return found


def run_epoch(policy: CachePolicy, order: Integers, start: int) -> Integers:
    """The keys that are hit in an epoch whose accesses begin at position ``start``; items of one byte."""
    hit = []
    for place, key in enumerate(order.tolist()):
        if key in policy:
            policy.used(key, start + place)
            hit.append(key)
        else:
            policy.offer(key, 1, start + place)
    return np.array(hit, np.int64)


def budget_of(entries: int, nbytes: int) -> int:
    """The budget of a directory in which so many copies of so many bytes have just room."""
    return max((entries * disk_space_of(nbytes) + (1 << 20)) * 64 // 63 + 1, LEAST_BUDGET)


def middle(epochs: int) -> range:
    """The middle half of the epochs: caches are full, and the end is far."""
    return range(epochs // 4, epochs - epochs // 4)


def most_hits(orders: Sequence[Integers], capacity: int) -> list[int]:
    """The hits of each epoch of Belady's rule with bypass, which knows all of the orders; items of equal size.

    Found without any cache: between two uses an item holds one of ``capacity`` places, or the second use is a miss. So
    intervals are put on machines: taken by their ends, each on the one that has been free for the least time, if any
    is. No more intervals fit (Carlisle and Lloyd, "On the k-coloring of intervals", Discrete Applied Mathematics 1995),
    and no more of those that end before any given time.
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
