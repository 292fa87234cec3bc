"""Caches under simulated epochs: the targets, and what knowledge and look-ahead are worth."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import seneca
from benchmarks.cache_replay import BLIND, MISLED, POLICIES, Draws, Shuffles, middle, most_hits, replay
from benchmarks.coordl import Lru, PageCache, hit_rates
from minato_gpu.caching import choice
from minato_gpu.caching.split import Shares
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
    accesses = len(middle(EPOCHS)) * KEYS / shards
    assert sum(best[half]) <= (choice.bound(shards, cache_share) + 0.03) * accesses


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


@pytest.mark.parametrize(("cache_share", "hit_rate"), [(0.35, 0.124), (0.65, 0.355)])
def test_a_page_cache_hits_what_it_did_on_a_kernel_and_more_than_lru(cache_share: float, hit_rate: float) -> None:
    """Of Linux 6.18, under a cgroup's limit of 24 and 45 MB: files of 50 KB, six epochs after the second."""
    orders, room = Shuffles(1290, 1, 1), int(cache_share * 1290)
    epochs = [orders.order(epoch) for epoch in range(20)]
    found, lru = hit_rates(PageCache(room, 0.05), epochs), hit_rates(Lru(room), epochs)
    assert found[0] == lru[0] == 0 and np.mean(found[2:]) == pytest.approx(hit_rate, abs=0.02)
    assert np.mean(found[2:]) > 1.2 * np.mean(lru[2:]) > 0.05
    in_sequence = [np.arange(1290)] * 4
    assert sum(hit_rates(PageCache(room, 500.0), in_sequence)) == sum(hit_rates(Lru(room), in_sequence)) == 0


# --- a cache that is split --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", seneca.MACHINES, ids=lambda machine: machine.name)
@pytest.mark.parametrize("cached", [0.1, 0.5, 2.0])
def test_added_times_are_never_longer_than_with_the_split_by_the_mean_of_rates(
    machine: seneca.Machine, cached: float
) -> None:
    def longest_s(shares: Shares) -> float:
        read_s = (1 - shares.raw - shares.fields) * 114_000 / machine.storage
        return max(read_s, shares.fields / machine.augment + (1 - shares.fields) / machine.prepare)

    budget = 114_000 * cached
    mean, times = seneca.mean_of_rates(machine, budget), seneca.added_times(machine, budget)
    assert longest_s(times) <= longest_s(mean) + 1e-12
    for shares in (mean, times):
        assert shares.raw + shares.fields <= 1 + 1e-9
        assert 114_000 * (shares.raw + 5.12 * shares.fields) <= budget * (1 + 1e-9)


def test_a_simulated_epoch_takes_what_its_bottleneck_takes() -> None:
    machine = seneca.Machine("", 1e6, 2000.0, 4000.0, 1e9, ("", ""))
    assert seneca.epoch_s(machine, Shares(0.0, 1.0), 2000) == pytest.approx(1.0, rel=0.1)
    assert seneca.epoch_s(machine, Shares(1.0, 0.0), 2000) == pytest.approx(0.5, rel=0.1)
    slow = machine._replace(storage=57e6)
    assert seneca.epoch_s(slow, Shares(0.0, 0.5), 2000) == pytest.approx(2.0, rel=0.1)
