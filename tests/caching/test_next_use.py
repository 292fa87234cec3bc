"""Next use: as good as can be where sizes are equal, not misled for long; and
what is true of every policy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from benchmarks.cache_replay import most_hits
from minato_gpu.caching.future import NEVER, Future
from minato_gpu.caching.next_use import NextUse
from minato_gpu.caching.policy import CachePolicy, Minio
from tests.caching.model import KEYS, Listed, Tier, epochs_of_keys, hits, hits_of, shuffled_shares
from tests.conftest import half


@given(epochs_of_keys | shuffled_shares(), st.integers(0, 30))
def test_by_every_epoch_it_has_as_many_hits_as_belady(epochs: list[list[int]], capacity: int) -> None:
    """Found in another way (see ``most_hits``), and equal epoch by epoch."""
    found = hits(NextUse(capacity, 30), epochs, len(epochs))
    assert [sum(each) for each in found] == most_hits([np.array(keys, int) for keys in epochs], capacity)


@given(epochs_of_keys, st.integers(0, KEYS))
def test_without_orders_it_never_evicts(epochs: list[list[int]], capacity: int) -> None:
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
            fresh.offer(key, 1, 0)
    assert hits_of(changed, second, look_ahead) == hits_of(fresh, second, look_ahead)


def test_a_missed_epoch_or_another_order_leaves_no_trace() -> None:
    """An item whose use was foretold and never came is no more wanted than others once the epoch is over."""
    policy = NextUse(1, KEYS)
    start = policy.begin(0, Listed(((0, 1, 0), (1, 2, 1), (2,))), 1)
    assert policy.offer(0, 1, start) == ()
    assert policy.offer(1, 1, start + 1) is None  # 0 is foretold to come sooner
    start = policy.begin(1, Listed(((0, 1, 0), (1, 2, 1), (2,))), 1)  # but did not come
    assert policy.offer(1, 1, start) == (0,)
    start = policy.begin(5, Listed(((),) * 5 + ((2, 3, 3),)), 1)  # epochs were left out
    assert policy.offer(3, 1, start + 1) == (1,)


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


@pytest.mark.parametrize("order", [[0, 2], [-1, 0]])
def test_there_are_no_other_keys(order: list[int]) -> None:
    with pytest.raises(ValueError, match="keys must be from 0 to 1, got"):
        Future(2).extend(np.array(order))


MAKERS: dict[str, Callable[[int], CachePolicy]] = {
    "minio": Minio,
    "next-use": lambda budget: NextUse(budget, KEYS),
}
every = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
keys = st.integers(0, KEYS - 1)
sizes = st.integers(0, 12)  # some larger than the budget
places = st.integers(0, 60)  # also such as are over, or come much later


class Used(RuleBasedStateMachine):
    """A tier at work: items of any size come again, in other sizes, are lost, and other orders come true."""

    @initialize(name=st.sampled_from(sorted(MAKERS)), budget=st.integers(0, 10))
    def made(self, name: str, budget: int) -> None:
        self.tier = Tier(MAKERS[name](budget))
        self.epoch = 0

    @rule(key=keys, nbytes=sizes, now=places)
    def offer(self, key: int, nbytes: int, now: int) -> None:
        before = dict(self.tier.kept)
        kept = self.tier.offer(key, nbytes, now)
        room = self.tier.policy.budget - sum(before.values()) + before.get(key, 0)
        assert not (kept and nbytes > self.tier.policy.budget)
        if nbytes <= room:  # whatever fits is kept, and nothing goes for it
            assert self.tier.kept == {**before, key: nbytes}
        if not kept:  # nor does anything go for nothing
            assert self.tier.kept == {other: size for other, size in before.items() if other != key}

    @rule(key=keys, nbytes=sizes, now=places)
    def access(self, key: int, nbytes: int, now: int) -> None:
        self.tier.access(key, nbytes, now)

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
def test_many_uses_do_not_fill_the_memory(make: Callable[[int], CachePolicy]) -> None:
    policy = make(10)
    for now in range(20_000):
        if now % KEYS in policy:
            policy.used(now % KEYS, now)
        else:
            policy.offer(now % KEYS, 3, now)
    assert max([len(each) for each in vars(policy).values() if isinstance(each, (list, dict))], default=0) < 5000


@given(shuffled_shares(), st.integers(0, 30))
def test_minio_keeps_who_came_first(epochs: list[list[int]], capacity: int) -> None:
    came = dict.fromkeys(key for keys in epochs for key in keys)
    first = set(list(came)[:capacity])
    seen: set[int] = set()
    for keys, found in zip(epochs, hits(Minio(capacity), epochs), strict=True):
        assert found == [key in seen & first for key in keys]
        seen |= set(keys)
