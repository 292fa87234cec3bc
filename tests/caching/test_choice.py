"""Which policy, how far ahead, what is wanted soon and what is kept in which form: by what hits and epochs come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cache_replay import ON_DISK, Shuffles, middle, most_hits, replay
from minato_gpu.caching.choice import Choice, bound, choose, look_ahead, reach
from minato_gpu.caching.future import Integers
from minato_gpu.caching.soon import Soon
from minato_gpu.caching.split import Means, Shares, seconds, split
from tests.caching.model import Listed, shuffled_shares


@given(st.floats(1, 64), st.floats(0, 1), st.floats(0, 1))
def test_more_room_is_never_worse_and_costs_a_bounded_look_ahead(shards: float, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert 0 <= bound(shards, low) <= bound(shards, high) <= 1 + 1e-9
    assert 0 <= look_ahead(shards, low) <= look_ahead(shards, high) <= min(4 * shards, 100)


@pytest.mark.parametrize(
    ("given", "policy", "ahead", "because"),
    [
        ({"shards": 1}, "minio", 0, "one reader"),
        ({"shards": 4}, "next-use", 3, "one item in 4, and it is known which, 3 epochs ahead"),
        ({"shards": 4, "known": False}, "minio", 0, "not known"),
        ({"shards": 4, "share": 1.0}, "minio", 0, "room for the whole set"),
        ({"shards": 1, "once": False}, "next-use", 2, "twice in an epoch"),
        ({"shards": 1, "once": False, "known": False}, "minio", 0, "not known"),
        ({"shards": 4, "once": False}, "next-use", 8, "twice in an epoch"),
        ({"shards": 1000, "once": False}, "next-use", 100, "twice in an epoch"),
        ({"shards": 0.1, "once": False}, "next-use", 1, "twice in an epoch"),
        ({"shards": 2.5}, "next-use", 2, "one item in 2.5"),
        ({"shards": 1.001}, "minio", 0, "one reader"),
    ],
)
def test_the_choice_and_its_reason(given: dict[str, Any], policy: str, ahead: int, because: str) -> None:
    known: dict[str, Any] = {"share": 0.25, "known": True, "once": True, **given}
    choice = choose(**known)
    assert choice == Choice(policy, ahead, choice.why)
    assert choice.why.startswith(f"{policy}: ") and because in choice.why


# --- what is wanted soon ---------------------------------------------------------------------------------------

KEYS, EPOCHS = 4000, 32
LISTED = (0, 1, 2, 3), (4, 5, 6, 7), (0, 4, 8, 9), (1, 5, 8, 9)


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
    first, again, other = Counted(LISTED), Counted(LISTED), Counted(LISTED[::-1])
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


def rate(hits: Sequence[int], orders: Shuffles) -> float:
    """Hit rate of the middle half of the epochs."""
    return sum(hits[epoch] for epoch in middle(EPOCHS)) / len(middle(EPOCHS)) / len(orders.order(0))


@pytest.mark.parametrize("shards", [2, 4, 8])
@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.75])
def test_it_comes_within_two_hundredths_of_the_best(shards: int, share: float) -> None:
    orders = Shuffles(KEYS, shards, 1)
    most = rate(most_hits([orders.order(epoch) for epoch in range(EPOCHS)], int(share * KEYS)), orders)
    found, first = (rate([*map(len, replay(policy, orders, share, EPOCHS))], orders) for policy in (ON_DISK, "minio"))
    assert 0.975 * most <= found <= most * 1.01, "of the middle half the best overall may have a little less"
    assert found > 1.1 * first


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


# --- raw bytes or fields: no other split makes a shorter epoch ---------------------------------------------------

_PART = st.floats(0.01, 10.0)


def _best(means: Means, budget: float) -> float:
    """Of a grid of splits."""
    found = []
    for fields in np.linspace(0, 1, 41):
        room = budget - fields * means.field_bytes
        if room < 0:
            break
        most = min(1 - fields, room / means.raw_bytes)
        found += [seconds(means, Shares(float(fields), float(raw))) for raw in np.linspace(0, most, 11)]
    return min(found)


@given(_PART, _PART, st.floats(0, 1), _PART, _PART, _PART)
def test_none_is_better(read: float, prepare: float, saved: float, raw: float, field: float, budget: float) -> None:
    means = Means(read, prepare, saved * prepare, raw, field)
    shares = split(means, budget)
    assert min(shares) >= 0 and sum(shares) <= 1 + 1e-6
    assert shares.fields * field + shares.raw * raw <= budget * (1 + 1e-6)
    assert seconds(means, shares) <= _best(means, budget) * (1 + 1e-6)
