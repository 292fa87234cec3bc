"""Next use: as good as can be where items are alike, better than others where they are not, not misled for long."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cache_replay import most_hits
from minato_gpu.caching.future import NEVER, Future
from minato_gpu.caching.lru import Lru
from minato_gpu.caching.minio import Minio
from minato_gpu.caching.next_use import NextUse
from minato_gpu.caching.policy import KEEP, PASS, Admission, CachePolicy
from tests.caching.model import KEYS, Listed, Tier, best_hits, epochs_of_keys, hits, shuffled_shares


@given(epochs_of_keys, st.integers(1, 3))
def test_no_choice_has_more_hits(epochs: list[list[int]], capacity: int) -> None:
    found = hits(NextUse(capacity, KEYS), epochs, len(epochs))
    assert sum(map(sum, found)) == best_hits([*chain(*epochs)], capacity)


@given(epochs_of_keys | shuffled_shares(), st.integers(0, 30))
def test_by_every_epoch_it_has_as_many_hits_as_belady(epochs: list[list[int]], capacity: int) -> None:
    """Found in another way (see ``most_hits``), and equal epoch by epoch."""
    found = hits(NextUse(capacity, 30), epochs, len(epochs))
    assert [sum(each) for each in found] == most_hits([np.array(keys, int) for keys in epochs], capacity)


@given(epochs_of_keys, st.integers(0, KEYS))
def test_without_orders_it_never_evicts_items_that_are_alike(epochs: list[list[int]], capacity: int) -> None:
    tier, other = Tier(NextUse(capacity, KEYS)), Tier(Minio(capacity))
    for number, keys in enumerate(epochs):
        tier.policy.begin(number, None, 3)
        assert [tier.access(key) for key in keys] == [other.access(key) for key in keys]


@given(shuffled_shares(), shuffled_shares(), st.integers(0, 30), st.integers(0, 4))
def test_after_a_change_of_orders_it_is_as_if_it_had_known(
    first: list[list[int]], second: list[list[int]], capacity: int, look_ahead: int
) -> None:
    """Other shuffles than were foretold, from some epoch on: what is decided then is what a policy decides that is
    given the same items in the beginning."""
    changed = NextUse(capacity, 30)
    hits(changed, first, look_ahead)
    fresh = NextUse(capacity, 30)
    fresh.begin(0, None, 0)
    for key in range(30):
        if key in changed:
            fresh.offer(key, 1, 1.0, 0)
    assert hits_of(changed, second, look_ahead) == hits_of(fresh, second, look_ahead)


def hits_of(policy: NextUse, epochs: list[list[int]], look_ahead: int) -> list[int]:
    """Hits of each epoch of a policy that may keep something already."""
    orders, counts = Listed(tuple(map(tuple, epochs))), []
    for epoch, keys in enumerate(epochs):
        counts.append(0)
        for now, key in enumerate(keys, policy.begin(epoch, orders, look_ahead)):
            if key in policy:
                policy.used(key, now)
                counts[-1] += 1
            else:
                policy.offer(key, 1, 1.0, now)
    return counts


def test_a_missed_epoch_or_another_order_leaves_no_trace() -> None:
    """An item whose use was foretold and never came is no more wanted than others once the epoch is over."""
    policy = NextUse(1, KEYS)
    start = policy.begin(0, Listed(((0, 1, 0), (1, 2, 1), (2,))), 1)
    assert policy.offer(0, 1, 1.0, start) == KEEP
    assert policy.offer(1, 1, 1.0, start + 1) == PASS  # 0 is foretold to come sooner
    start = policy.begin(1, Listed(((0, 1, 0), (1, 2, 1), (2,))), 1)  # but did not come
    assert policy.offer(1, 1, 1.0, start) == Admission(True, (0,))
    start = policy.begin(5, Listed(((),) * 5 + ((2, 3, 3),)), 1)  # epochs were left out
    assert policy.offer(3, 1, 1.0, start + 1) == Admission(True, (1,))


def test_accesses_out_of_order_are_all_taken_for_what_they_are() -> None:
    policy = NextUse(2, KEYS)
    start = policy.begin(0, Listed(((0, 1, 2, 0, 1, 2),)), 0)
    assert policy.offer(1, 1, 1.0, start + 1) == KEEP  # was read faster than the one before it
    assert policy.offer(0, 1, 1.0, start) == KEEP
    assert policy.offer(2, 1, 1.0, start + 2) == PASS
    policy.used(1, start + 4)
    assert policy.offer(2, 1, 1.0, start + 2) == Admission(True, (1,))  # which will not be needed any more


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("known", [True, False])
def test_unlike_items_save_more_seconds_than_with_others(shards: int, known: bool) -> None:
    for seed in range(2):
        rng, count, epochs = np.random.default_rng(seed), 250, 12
        nbytes = (rng.lognormal(0, 1, count) * 1e5).astype(int) + 1
        costs = 0.02 + nbytes / 5e6 * rng.lognormal(0, 0.5, count)
        orders = Listed(tuple(tuple(rng.permutation(count)[: count // shards].tolist()) for _ in range(epochs + 8)))
        budget = int(0.3 * nbytes.sum())
        saved = {}
        policies: tuple[CachePolicy, ...] = (NextUse(budget, count), Lru(budget), Minio(budget))
        for policy in policies:
            tier, saved[type(policy)] = Tier(policy), 0.0
            for epoch in range(epochs):
                start = policy.begin(epoch, orders if known else None, 8)
                for now, key in enumerate(orders.keys[epoch], start):
                    if tier.access(key, int(nbytes[key]), float(costs[key]), now):
                        saved[type(policy)] += float(costs[key])
        assert saved[NextUse] > 1.2 * max(saved[Lru], saved[Minio])


def test_of_items_alike_in_all_but_size_or_cost_the_dear_and_small_stay() -> None:
    policy = NextUse(10, KEYS)
    start = policy.begin(0, Listed(((0, 1, 2), (2, 1, 0))), 1)
    assert policy.offer(0, 8, 1.0, start) == KEEP
    assert policy.offer(1, 8, 3.0, start + 1) == Admission(True, (0,))
    assert policy.offer(2, 9, 2.0, start + 2) == PASS  # a byte earns less, though it is needed sooner
    assert policy.offer(0, 0, 0.0, start + 2) == KEEP


def test_an_item_makes_room_once_however_often_it_came() -> None:
    policy = NextUse(2, KEYS)
    for _ in range(2):
        policy.dropped(0)
        assert policy.offer(0, 1, 0.1, 0) == KEEP
    assert policy.offer(1, 1, 9.0, 0) == KEEP
    assert policy.offer(2, 2, 2.0, 0) == PASS  # 0 alone is no room for it, and 1 is dearer
    assert policy.offer(2, 1, 1.0, 0) == Admission(True, (0,))


@pytest.mark.parametrize("changed", [True, False])
def test_orders_that_change_from_one_epoch_to_the_next_count_from_then_on(changed: bool) -> None:
    """A sampler with another seed, say: what comes after the epochs that were known already is of the new one, too."""
    first = Listed(((0, 1), (0, 1), (1, 0)))
    policy = NextUse(1, KEYS)
    policy.begin(0, first, 2)
    start = policy.begin(1, Listed(((0, 1), (0, 1), (0, 1))) if changed else first, 1)
    assert policy.offer(0, 1, 1.0, start) == KEEP
    assert policy.offer(1, 1, 1.0, start + 1) == (PASS if changed else Admission(True, (0,)))


# --- when keys are needed next, against looking for it ---------------------------------------------------------

steps = st.lists(st.sampled_from(["extend", "forget"]), max_size=8)


def use_after(accesses: list[int], key: int, now: int, start: int) -> int:
    """The first position after ``now`` of the key in ``accesses``, which begin at ``start``."""
    return next((at for at, each in enumerate(accesses, start) if each == key and at > now), NEVER)


@given(epochs_of_keys, steps, st.integers(0, 50), st.lists(st.tuples(st.integers(0, KEYS - 1), st.integers(-3, 60))))
def test_it_is_the_first_use_after_now(
    epochs: list[list[int]], actions: list[str], start: int, asked: list[tuple[int, int]]
) -> None:
    """Whatever was forgotten and added before; of a key, times are asked for in order."""
    future, known, comes = Future(KEYS, start), [], iter(epochs)
    begin = start
    for action in ["extend", *actions]:
        if action == "extend" and (order := next(comes, None)) is not None:
            future.extend(np.array(order, np.int64))
            known.append(order)
        elif action == "forget" and known:
            begin += len(known.pop(0))
            future.forget_epoch()
    accesses = [key for order in known for key in order]
    assert (future.start, future.end, future.epochs) == (begin, begin + len(accesses), len(known))
    assert future.next_use.tolist() == [use_after(accesses, key, -1, begin) for key in range(KEYS)]
    for key, now in sorted(asked, key=lambda each: each[1]):
        assert future.after(key, now) == use_after(accesses, key, now, begin)
    lengths = np.cumsum([0, *map(len, known)]) + begin
    for position in range(begin, future.end):
        assert lengths[future.epoch(position)] <= position < lengths[future.epoch(position) + 1]


def test_a_time_that_was_asked_for_is_over() -> None:
    """Of accesses that come out of order, the later one tells what is needed next."""
    future = Future(2)
    future.extend(np.array([0, 0, 1, 0]))
    assert future.after(0, 1) == 3
    assert future.after(0, 0) == 3


@pytest.mark.parametrize("order", [[0, 2], [-1, 0]])
def test_there_are_no_other_keys(order: list[int]) -> None:
    with pytest.raises(ValueError, match="keys must be from 0 to 1, got"):
        Future(2).extend(np.array(order))
