"""Which host keeps what."""

from __future__ import annotations

from collections import Counter

from minato_gpu.caching.partition import Partition

HOSTS = ("a:1", "b:1", "c:1", "d:1")
NAMES = [b"%d" % number for number in range(4000)]


def test_each_host_owns_an_equal_share_and_all_agree() -> None:
    partition, other = Partition(HOSTS), Partition(HOSTS[::-1])
    owners = [partition.owner(name) for name in NAMES]
    assert owners == [other.owner(name) for name in NAMES]
    assert all(abs(count - 1000) < 120 for count in Counter(owners).values()) and len(set(owners)) == 4


def test_where_one_leaves_only_what_it_owned_moves_and_to_all_others() -> None:
    partition = Partition(HOSTS)
    before = [partition.owner(name) for name in NAMES]
    after = [partition.owner(name, {"c:1"}) for name in NAMES]
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {old for old, _ in moved} == {"c:1"} and len(moved) == before.count("c:1")
    assert {new for _, new in moved} == {"a:1", "b:1", "d:1"}
    assert partition.owner(b"any", set(HOSTS)) is None
