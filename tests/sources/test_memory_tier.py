"""The books of the tier in memory: what stays, what goes, and that no block is forgotten or returned twice."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minato_gpu.caching.future import Integers, share
from minato_gpu.sources.blocks import space_of
from minato_gpu.sources.memory_tier import NO_ITEM, Begun, Copy, MemoryTier, OfItems
from minato_gpu.sources.source import Key
from tests.conftest import half

PAGE = 4096
SIZE = 3000


@dataclass(frozen=True)
class Shares:
    """What the first of ``shards`` reads of shuffles of ``keys``."""

    keys: int
    shards: int

    def order(self, epoch: int) -> Integers:
        return share(np.random.default_rng(epoch).permutation(self.keys), 0, self.shards)


@dataclass(frozen=True)
class Rotated:
    """Epoch 1 begins with key 2."""

    keys: int

    def order(self, epoch: int) -> Integers:
        return np.roll(np.arange(self.keys), -epoch - 1)


class Books:
    """A tier and what its blocks hold, as whoever has the blocks must keep it."""

    def __init__(self, budget: int, samples: int) -> None:
        self.tier = MemoryTier(budget, samples)
        self.kept: dict[int, Copy] = {}  # by block
        self._blocks = count()

    def read(self, sample: int, keys: tuple[Key, ...], nbytes: int = SIZE) -> list[bool]:
        """A sample is wanted, and what is missed is read at once; returns what was a hit."""
        return [self.wanted(item, key, nbytes) for item, key in self._items(sample, keys)]

    def _items(self, sample: int, keys: tuple[Key, ...]) -> list[tuple[int, Key]]:
        return list(zip(self.tier.items(sample, len(keys)), keys, strict=True))

    def wanted(self, item: int, key: Key, nbytes: int = SIZE) -> bool:
        if item == NO_ITEM:
            return False
        now, copy = self.tier.access(key)
        if copy is None:
            self.offered(item, key, now, nbytes)
            return False
        assert self.kept[copy.block] == copy
        assert copy.key == key
        return True

    def offered(self, item: int, key: Key, now: int, nbytes: int = SIZE) -> bool:
        copy = Copy(key, next(self._blocks), nbytes, 7)
        stays, going = self.tier.offer(item, copy, now)
        for gone in going:
            assert self.kept.pop(gone.block) == gone, "it goes once, and only if it was there"
        if stays:
            self.kept[copy.block] = copy
        self.check()
        return stays

    def check(self) -> None:
        """The tier has what it has been given, and not more than it may have."""
        counts = self.tier.counts()
        memory = sum(space_of(copy.nbytes) for copy in self.kept.values())
        assert counts["bytes"] == memory <= self.tier.budget
        assert counts["copies"] == len(self.kept)
        assert sorted(copy.block for copy in self.tier._copies.values()) == sorted(self.kept)


def key(name: object) -> Key:
    return f"/data/{name}", 0, None


def test_a_share_of_shuffles_that_are_known_has_more_hits_than_what_came_first() -> None:
    orders = Shares(400, 4)
    books = Books(100 * PAGE, 400)
    hits = []
    for number in range(16):
        books.tier.begin(Begun(number, orders, 4))
        hits.append(np.mean([books.read(each, (key(each),)) for each in orders.order(number).tolist()]))
    assert np.mean(hits[4:]) >= 0.5
    assert str(books.tier.counts()["policy"]) == "next-use"
    assert "one item in 4" in str(books.tier.counts()["why"])


def test_what_was_missed_before_the_policy_changed_is_not_taken_for_over() -> None:
    """Its read ends in the next epoch, where it is needed first of all."""
    books = Books(2 * PAGE, 4)
    books.tier.begin(Begun(0, None, 1))
    for each in (0, 1):
        books.read(each, (key(each),))
    books.tier.items(2, 1)
    late, _ = books.tier.access(key(2))
    books.tier.begin(Begun(1, Rotated(4), 2))
    assert list(books.tier.items(2, 1)) == [2]
    assert books.tier.counts()["policy"] == "next-use"
    assert books.offered(2, key(2), late)
    assert {copy.key for copy in books.kept.values()} == {key(2), key(0)}, "1 is needed last"


def test_orders_of_items_follow_those_of_samples() -> None:
    assert OfItems(Shares(60, 1), 50, 1).order(0) is None, "of another data set"
    orders = OfItems(Shares(5, 1), 5, 2)
    assert orders.order(3) is not None
    assert np.array_equal(orders.order(3), [each for at in Shares(5, 1).order(3) for each in (at, at + 5)])  # type: ignore[arg-type]
    assert orders == OfItems(Shares(5, 1), 5, 2)
    assert hash(orders) == hash(OfItems(Shares(5, 1), 5, 2))
    assert orders not in (OfItems(Shares(5, 1), 5, 1), OfItems(Shares(6, 1), 5, 2), "another")


SIZES = st.sampled_from([0, 1, SIZE, 20_000, 60_000])


@half()
@given(st.data())
def test_any_course(data: st.DataObject) -> None:
    """Whatever is wanted, read late or read twice: nothing is lost, the budget holds (``Books.check``)."""
    samples = data.draw(st.integers(1, 12))
    budget = data.draw(st.integers(1, 40)) * PAGE
    books, late, number = Books(budget, samples), list[tuple[int, Key, int]](), 0
    for _ in range(data.draw(st.integers(1, 60))):
        step = data.draw(st.sampled_from(["read", "read", "read", "miss", "late", "begin", "again"]))
        sample, parts = data.draw(st.integers(-1, samples)), data.draw(st.integers(0, 3))
        keys = tuple(key(name) for name in data.draw(st.lists(st.integers(0, 9), min_size=parts, max_size=parts)))
        if step == "read":
            books.read(sample, keys, data.draw(SIZES))
        elif step == "miss":
            for item, each in books._items(sample, keys):
                if item != NO_ITEM and (found := books.tier.access(each))[1] is None:
                    late.append((item, each, found[0]))
        elif step == "late" and late:
            books.offered(*late.pop(data.draw(st.integers(0, len(late) - 1))), data.draw(SIZES))
        elif step == "begin":
            number += 1
            shards = data.draw(st.integers(1, 3))
            books.tier.begin(Begun(number, data.draw(st.sampled_from([None, Shares(samples, shards)])), shards))
        elif step == "again":
            books.tier.skip(1)
        books.check()
