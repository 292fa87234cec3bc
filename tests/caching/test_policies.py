"""What is true of every policy: budgets hold, whatever is offered, and what each must keep."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minato_gpu.caching.lru import Lru
from minato_gpu.caching.minio import Minio
from minato_gpu.caching.next_use import NextUse
from minato_gpu.caching.policy import KEEP, PASS, CachePolicy
from tests.caching.model import KEYS, Listed, Tier, epochs_of_keys, hits, lru_hits, shuffled_shares
from tests.support.examples import half

MAKERS: dict[str, Callable[[int], CachePolicy]] = {
    "minio": Minio,
    "lru": Lru,
    "next-use": lambda budget: NextUse(budget, KEYS),
}
every = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
keys = st.integers(0, KEYS - 1)
sizes = st.integers(0, 12)  # some larger than the budget
costs = st.sampled_from([0.0, 0.1, 0.1, 1.0, 7.5])
places = st.integers(0, 60)  # also such as are over, or come much later


class Used(RuleBasedStateMachine):
    """A tier at work: items of any size come again, in other sizes, are lost, and other orders come true."""

    @initialize(name=st.sampled_from(sorted(MAKERS)), budget=st.integers(0, 10))
    def made(self, name: str, budget: int) -> None:
        self.tier = Tier(MAKERS[name](budget))
        self.epoch = 0

    @rule(key=keys, nbytes=sizes, cost=costs, now=places)
    def offer(self, key: int, nbytes: int, cost: float, now: int) -> None:
        before = dict(self.tier.kept)
        kept = self.tier.offer(key, nbytes, cost, now)
        room = self.tier.policy.budget - sum(before.values()) + before.get(key, 0)
        assert not (kept and nbytes > self.tier.policy.budget)
        if nbytes <= room:  # whatever fits is kept, and nothing goes for it
            assert self.tier.kept == {**before, key: nbytes}
        if not kept:  # nor does anything go for nothing
            assert self.tier.kept == {other: size for other, size in before.items() if other != key}

    @rule(key=keys, nbytes=sizes, cost=costs, now=places)
    def access(self, key: int, nbytes: int, cost: float, now: int) -> None:
        self.tier.access(key, nbytes, cost, now)

    @rule(key=keys)
    def drop(self, key: int) -> None:
        self.tier.drop(key)
        self.tier.drop(key)

    @rule(epochs=epochs_of_keys, known=st.booleans(), ahead=st.integers(0, 3), step=st.integers(0, 2))
    def begin(self, epochs: list[list[int]], known: bool, ahead: int, step: int) -> None:
        self.epoch += step
        orders = Listed(((),) * self.epoch + tuple(map(tuple, epochs)))
        self.tier.policy.begin(self.epoch, orders if known else None, ahead)

    @invariant()
    def budget_holds(self) -> None:
        if hasattr(self, "tier"):
            self.tier.check()


TestUsed = Used.TestCase
TestUsed.settings = half(TestUsed.settings)


@every
@pytest.mark.parametrize(("nbytes", "cost"), [(-1, 1.0), (1, -1.0), (1, math.nan)])
def test_no_item_has_a_negative_size_or_cost(make: Callable[[int], CachePolicy], nbytes: int, cost: float) -> None:
    with pytest.raises(ValueError, match="must be >= 0"):
        make(10).offer(0, nbytes, cost, 0)


@every
def test_an_item_that_is_too_large_takes_nothing_with_it(make: Callable[[int], CachePolicy]) -> None:
    policy = make(10)
    assert policy.offer(0, 4, 1.0, 0) == KEEP
    assert policy.offer(1, 11, 1e9, 1) == PASS
    assert policy.offer(2, 0, 1e-9, 2) == KEEP  # an item without bytes always fits
    assert policy.used_bytes == 4 and 0 in policy and 2 in policy
    policy.dropped(0)
    assert policy.offer(0, 11, 1.0, 3) == PASS  # a new version that is too large
    assert policy.used_bytes == 0 and len(policy) == 1


@every
def test_many_uses_do_not_fill_the_memory(make: Callable[[int], CachePolicy]) -> None:
    policy = make(10)
    for now in range(20_000):
        if now % KEYS in policy:
            policy.used(now % KEYS, now)
        else:
            policy.offer(now % KEYS, 3, 1.0 + now % KEYS, now)
    assert max([len(each) for each in vars(policy).values() if isinstance(each, (list, dict))], default=0) < 5000


@given(shuffled_shares(), st.integers(0, 30))
def test_minio_keeps_who_came_first(epochs: list[list[int]], capacity: int) -> None:
    came = dict.fromkeys(key for keys in epochs for key in keys)
    first = set(list(came)[:capacity])
    seen: set[int] = set()
    for keys, found in zip(epochs, hits(Minio(capacity), epochs), strict=True):
        assert found == [key in seen & first for key in keys]
        seen |= set(keys)


@given(epochs_of_keys, st.integers(0, KEYS))
def test_lru_of_items_that_are_alike(epochs: list[list[int]], capacity: int) -> None:
    expected = lru_hits(epochs, capacity) if capacity else [[False] * len(keys) for keys in epochs]
    assert hits(Lru(capacity), epochs) == expected
