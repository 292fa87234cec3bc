"""What policies must do, in the simplest words: for tests that compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from benchmarks.cache_replay import run_epoch
from minato_gpu.caching.future import Integers
from minato_gpu.caching.policy import CachePolicy


@dataclass(frozen=True)
class Listed:
    """Orders that are given."""

    keys: tuple[tuple[int, ...], ...]

    def order(self, epoch: int) -> Integers | None:
        return np.array(self.keys[epoch], np.int64) if epoch < len(self.keys) else None


class Tier:
    """Keeps what its policy says, and checks what that says."""

    def __init__(self, policy: CachePolicy) -> None:
        self.policy = policy
        self.kept: dict[int, int] = {}

    def access(self, key: int, nbytes: int = 1, now: int = 0) -> bool:
        """Whether it was a hit."""
        assert (key in self.policy) == (key in self.kept)
        if key in self.kept:
            self.policy.used(key, now)
            return True
        self.offer(key, nbytes, now)
        return False

    def offer(self, key: int, nbytes: int, now: int = 0) -> bool:
        """Whether it is kept; an older copy goes first."""
        if key in self.kept:
            self.drop(key)
        evicted = self.policy.offer(key, nbytes, now)
        for each in evicted or ():
            del self.kept[each]
        if evicted is not None:
            self.kept[key] = nbytes
        self.check()
        return evicted is not None

    def drop(self, key: int) -> None:
        self.policy.dropped(key)
        self.kept.pop(key, None)
        self.check()

    def check(self) -> None:
        assert self.policy.used_bytes == sum(self.kept.values()) <= self.policy.budget
        assert len(self.policy) == len(self.kept)
        assert all(key in self.policy for key in self.kept)


def hits(policy: CachePolicy, epochs: Sequence[Sequence[int]], look_ahead: int = 0) -> list[list[bool]]:
    """Of each access, whether it was a hit; items of one byte. ``look_ahead``: of ``NextUse``."""
    tier, found, orders = Tier(policy), [], Listed(tuple(map(tuple, epochs)))
    for epoch, keys in enumerate(epochs):
        start = policy.begin(epoch, orders, look_ahead)
        found.append([tier.access(key, now=now) for now, key in enumerate(keys, start)])
    return found


def hits_of(policy: CachePolicy, epochs: Sequence[Sequence[int]], look_ahead: int) -> list[int]:
    """Hits of each epoch of a policy that may keep something already."""
    orders = Listed(tuple(map(tuple, epochs)))
    return [
        len(run_epoch(policy, np.array(keys, np.int64), policy.begin(epoch, orders, look_ahead)))
        for epoch, keys in enumerate(epochs)
    ]


def best_hits(accesses: Sequence[int], capacity: int) -> int:
    """The most hits that anyone could have, by trying every choice of what to keep after every access."""
    reached = {frozenset[int](): 0}
    for key in accesses:
        after: dict[frozenset[int], int] = {}
        for kept, count in reached.items():
            count += key in kept
            choices = [kept, *(kept - {gone} | {key} for gone in kept)]
            if len(kept) < capacity:
                choices.append(kept | {key})
            for choice in choices:
                after[choice] = max(after.get(choice, 0), count)
        reached = after
    return max(reached.values())


KEYS = 6
epochs_of_keys = st.lists(st.lists(st.integers(0, KEYS - 1), max_size=9), min_size=1, max_size=5)
"""Epochs in which a key may come any number of times."""


@st.composite
def shuffled_shares(draw: st.DrawFn) -> list[list[int]]:
    """Shares of shuffled epochs: each key at most once in each."""
    keys, length = draw(st.integers(1, 30)), draw(st.integers(1, 30))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    return [rng.permutation(keys)[:length].tolist() for _ in range(draw(st.integers(1, 12)))]
