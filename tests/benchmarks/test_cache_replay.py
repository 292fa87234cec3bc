"""Caches under simulated epochs: the targets, and what knowledge and look-ahead are worth."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cache_replay import (
    BLIND,
    MISLED,
    POLICIES,
    Draws,
    Shuffles,
    middle,
    most_hits,
    replay,
)
from minato_gpu.caching import choice
from tests.caching.model import best_hits, epochs_of_keys

KEYS, EPOCHS = 400, 24


def counted(policy: str, orders: Shuffles | Draws, cache_share: float, epochs: int = EPOCHS) -> list[int]:
    """Hits of each epoch."""
    return [len(hit) for hit in replay(policy, orders, cache_share, epochs)]


@given(epochs_of_keys, st.integers(0, 3))
def test_no_choice_has_more_hits_than_most_hits(epochs: list[list[int]], capacity: int) -> None:
    assert sum(most_hits([np.array(keys, int) for keys in epochs], capacity)) == best_hits([*chain(*epochs)], capacity)


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
@pytest.mark.parametrize("cache_share", [0.1, 0.25, 0.5, 0.75])
def test_next_use_comes_within_two_hundredths_of_the_best(shards: int, cache_share: float) -> None:
    orders, half = Shuffles(KEYS, shards, 1), slice(EPOCHS // 4, -EPOCHS // 4)
    best = most_hits([orders.order(epoch) for epoch in range(EPOCHS)], int(cache_share * KEYS))
    found = counted("next-use", orders, cache_share)
    assert 0.98 * sum(best[half]) <= sum(found[half])
    assert all(sum(found[:epoch]) <= sum(best[:epoch]) for epoch in range(EPOCHS + 1))
    assert (
        sum(best[half])
        <= (choice.bound(shards, cache_share) + 0.03)
        * sum(middle(EPOCHS).count(e) for e in range(EPOCHS))
        * KEYS
        / shards
    )


@pytest.mark.parametrize("cache_share", [0.1, 0.25, 0.5, 0.75])
@pytest.mark.parametrize("policy", ["minio", "next-use", BLIND])
def test_one_reader_hits_exactly_what_is_kept(policy: str, cache_share: float) -> None:
    assert counted(policy, Shuffles(KEYS, 1, 1), cache_share, 6) == [0] + [int(cache_share * KEYS)] * 5


@pytest.mark.parametrize("sigma", [0.0, 1.0])
@pytest.mark.parametrize("cache_share", [0.1, 0.25, 0.5, 0.75])
def test_of_draws_with_replacement_next_use_comes_near_the_best(sigma: float, cache_share: float) -> None:
    """Where it is wrong about epochs to come, it still has more hits than what needs no orders."""
    orders, half = Draws(KEYS, sigma, 1), slice(EPOCHS // 4, -EPOCHS // 4)
    best = most_hits([orders.order(epoch) for epoch in range(EPOCHS)], int(cache_share * KEYS))
    hits = {policy: sum(counted(policy, orders, cache_share)[half]) for policy in (*POLICIES, MISLED)}
    assert sum(best[half]) >= hits["next-use"] >= 0.98 * sum(best[half])
    assert hits["next-use"] > hits[MISLED] > 1.02 * hits["minio"]
