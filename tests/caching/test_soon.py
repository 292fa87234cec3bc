"""What stays on disk: what the orders of epochs to come want soon, as far as they are known."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cache_replay import ON_DISK, Items, middle, most_hits, replay
from minato_gpu.analysis.virtual_epochs import Shuffles
from minato_gpu.caching.choice import bound, reach
from minato_gpu.caching.future import Integers
from minato_gpu.caching.soon import Soon
from tests.caching.model import Listed, shuffled_shares

EPOCHS = Listed(((0, 1, 2, 3), (4, 5, 6, 7), (0, 4, 8, 9), (1, 5, 8, 9)))


def soon_after(epoch: int, reach: float, orders: Listed = EPOCHS) -> set[int]:
    soon = Soon(10)
    assert soon.begin(epoch, orders, reach)
    return {key for key in range(10) if soon.after(epoch, key)}


def test_soon_is_what_comes_within_so_many_epochs_and_a_part_of_the_next() -> None:
    assert soon_after(0, 0.0) == set()
    assert soon_after(0, 0.5) == {4, 5}
    assert soon_after(0, 1.0) == {4, 5, 6, 7}
    assert soon_after(0, 1.25) == {4, 5, 6, 7, 0}
    assert soon_after(1, 2.0) == {0, 1, 4, 5, 8, 9}


def test_of_the_epoch_before_it_is_still_known_and_of_others_not() -> None:
    soon = Soon(10)
    for epoch in range(3):
        assert soon.begin(epoch, EPOCHS, 1.0)
    assert [key for key in range(10) if soon.after(1, key)] == [0, 4, 8, 9]
    assert [key for key in range(10) if soon.after(2, key)] == [1, 5, 8, 9]
    assert all(soon.after(epoch, key) for epoch in (0, 3) for key in range(10))
    assert soon.after(2, -1) and soon.after(2, 10), "of what is no key nothing is known"


@pytest.mark.parametrize("orders", [Listed(((0,), (10,))), Listed(((0,), (-1,))), Listed(((0,),))])
def test_orders_that_are_not_known_or_of_another_data_set(orders: Listed) -> None:
    soon = Soon(10)
    assert not soon.begin(0, orders, 1.0)
    assert all(soon.after(0, key) for key in range(10))


@dataclass(frozen=True)
class Counted(Listed):
    asked: list[int] = field(default_factory=list, compare=False)

    def order(self, epoch: int) -> Integers | None:
        self.asked.append(epoch)
        return super().order(epoch)


def test_each_order_is_drawn_once_until_something_changes() -> None:
    first, again, other = Counted(EPOCHS.keys), Counted(EPOCHS.keys), Counted(EPOCHS.keys[::-1])
    soon = Soon(10)
    assert soon.begin(0, first, 1.5) and soon.begin(1, again, 2.0)
    assert (first.asked, again.asked) == ([1, 2, 3], []), "of the first: it has come further in drawing them"
    assert soon.begin(1, other, 2.0)
    assert other.asked == [2, 3]
    assert {key for key in range(10) if soon.after(1, key)} == {4, 5, 6, 7, 0, 1, 2, 3}


@given(st.floats(1, 64), st.floats(0, 1))
def test_reach_takes_the_room_and_has_the_hits_that_the_bound_has(shards: float, share: float) -> None:
    epochs = reach(shards, share)
    whole, part = int(epochs), epochs - int(epochs)
    returns = [(1 / shards) * (1 - 1 / shards) ** (after - 1) for after in range(1, whole + 2)]
    taken = sum(after * each for after, each in enumerate(returns[:whole], 1)) + (whole + 1) * part * returns[whole]
    assert taken <= share * shards + 1e-9
    if epochs < min(int(4 * shards), 100):
        assert taken == pytest.approx(share * shards)
        assert sum(returns[:whole]) + part * returns[whole] == pytest.approx(bound(shards, share), abs=1e-6)


def hits(policy: str, shards: int, share: float, keys: int, epochs: int = 32) -> float:
    """Hit rate of the middle half of the epochs."""
    orders = Shuffles(keys, shards, 1)
    found = replay(policy, orders, Items.equal(keys), share, epochs)
    return sum(len(found[epoch]) for epoch in middle(epochs)) / len(middle(epochs)) / len(orders.order(0))


@pytest.mark.parametrize("shards", [2, 4, 8])
@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.75])
def test_it_comes_within_two_hundredths_of_the_best(shards: int, share: float) -> None:
    orders, epochs = Shuffles(4000, shards, 1), 32
    best = most_hits([orders.order(epoch) for epoch in range(epochs)], int(share * 4000))
    most = sum(best[epoch] for epoch in middle(epochs)) / len(middle(epochs)) / len(orders.order(0))
    found = hits(ON_DISK, shards, share, 4000)
    assert 0.975 * most <= found <= most * 1.01, "of the middle half the best overall may have a little less"
    assert found > 1.1 * hits("minio", shards, share, 4000)


@given(shuffled_shares(), st.floats(0, 6))
def test_what_is_soon_is_in_the_orders_that_it_is_said_to_be_in(epochs: list[list[int]], reach: float) -> None:
    keys = max(max(each) for each in epochs) + 1
    soon, looked = Soon(keys), ceil(reach)
    for epoch in range(len(epochs)):
        known = soon.begin(epoch, Listed(tuple(map(tuple, epochs))), reach)
        assert known == (epoch + looked < len(epochs))
        for key in range(keys):
            comes = [key in later for later in epochs[epoch + 1 : epoch + 1 + looked]]
            stays = soon.after(epoch, key)
            assert not known or any(comes[: int(reach)]) <= stays <= any(comes)
