"""Which policy, and how far ahead: DESIGN.md's table, and reasons that name what decided."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minato_gpu.caching.choice import Choice, alike, bound, choose, look_ahead, new_policy
from minato_gpu.caching.lru import Lru
from minato_gpu.caching.minio import Minio
from minato_gpu.caching.next_use import NextUse
from minato_gpu.caching.policy import Policy

TABLE = {
    (2, 0.25): (1, 0.500),
    (2, 0.50): (2, 0.750),
    (4, 0.10): (2, 0.325),
    (4, 0.25): (3, 0.563),
    (4, 0.50): (6, 0.785),
    (4, 0.75): (9, 0.922),
    (8, 0.10): (4, 0.372),
    (8, 0.25): (7, 0.592),
    (8, 0.50): (13, 0.801),
    (8, 0.75): (20, 0.928),
}
"""Shards and share of the set: epochs of look-ahead that suffice in simulation, and the bound of the hit rate."""


@pytest.mark.parametrize(("shards", "share"), TABLE)
def test_the_table(shards: int, share: float) -> None:
    epochs, most = TABLE[shards, share]
    assert look_ahead(shards, share) == epochs
    assert bound(shards, share) == pytest.approx(most, abs=0.0006)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_one_reader_hits_what_it_keeps(share: float) -> None:
    assert bound(1, share) == pytest.approx(share)
    assert look_ahead(1, share) == (share > 0)


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
        ({"shards": 1, "alike": False}, "next-use", 0, "most seconds for its bytes"),
        ({"shards": 4, "alike": False, "known": False}, "next-use", 0, "most seconds for its bytes"),
        ({"shards": 4, "alike": False}, "next-use", 3, "one item in 4"),
        ({"shards": 1, "once": False}, "next-use", 1, "twice in an epoch"),
        ({"shards": 1, "once": False, "share": 0.75}, "next-use", 3, "twice in an epoch"),
        ({"shards": 1, "once": False, "known": False}, "minio", 0, "not known"),
        ({"shards": 4, "once": False, "share": 0.5}, "next-use", 7, "twice in an epoch"),
        ({"shards": 1000, "once": False}, "next-use", 100, "twice in an epoch"),
        ({"shards": 0.1, "once": False}, "next-use", 0, "twice in an epoch"),
        ({"shards": 2.5}, "next-use", 2, "one item in 2.5"),
        ({"shards": 1.001}, "minio", 0, "one reader"),
    ],
)
def test_the_choice_and_its_reason(given: dict[str, Any], policy: str, ahead: int, because: str) -> None:
    known: dict[str, Any] = {"share": 0.25, "known": True, "alike": True, "once": True, **given}
    choice = choose(**known)
    assert choice == Choice(policy, ahead, choice.why)
    assert choice.why.startswith(f"{policy}: ") and because in choice.why


@pytest.mark.parametrize(("name", "kind"), [("minio", Minio), ("lru", Lru), ("next-use", NextUse)])
def test_policies_by_name(name: str, kind: type[Policy]) -> None:
    policy = new_policy(name, 7, 3)
    assert type(policy) is kind and policy.budget == 7


def test_a_name_of_no_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no policy 'belady'"):
        new_policy("belady", 7, 3)


def test_what_is_alike() -> None:
    rng = np.random.default_rng(0)
    nbytes = (rng.lognormal(0, 1, 1000) * 1e5).astype(int) + 1
    assert alike([], [])
    assert alike([7] * 9, [0.1] * 9)
    assert alike(nbytes, nbytes / 5e6)  # what counts is what a byte earns
    assert not alike(nbytes, np.full(1000, 0.05))
    assert not alike([7] * 1000, rng.lognormal(0, 1, 1000))
    assert alike([0, 0], [0.0, 0.0])
