"""Accounts for the bytes that stay in shared memory for later epochs. The bytes themselves are elsewhere (blocks.py).

A *sample* is a whole number, the data set's index; each has one source or several, its *parts*. An *item* is one part
of one sample, and what policies (caching/) know of: number part * samples + sample. What has another key than a whole
number is not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from minato_gpu.caching.choice import Choice, choose
from minato_gpu.caching.future import Integers, Orders
from minato_gpu.caching.next_use import NextUse
from minato_gpu.caching.policy import CachePolicy, Minio
from minato_gpu.sources.blocks import space_of
from minato_gpu.sources.source import FIELDS, Key

NO_ITEM = -1


class Copy(NamedTuple):
    """Bytes of a source, or a sample's fields, in a block."""

    key: Key
    block: int
    nbytes: int
    stamp: int


class Begun(NamedTuple):
    """The beginning of an epoch, as it is announced to a tier."""

    epoch: int
    orders: Orders | None  # what is known of epochs to come, in samples
    shards: float  # it reads one sample in so many, as where ranks share it out
    once: bool = True  # none of them twice
    skipped: int = 0  # samples of the epoch that an earlier run has read


class MemoryTier:
    """Keeps copies of items of ``samples`` samples, in ``budget`` bytes of memory at most."""

    def __init__(self, budget: int, samples: int) -> None:
        self.budget = budget
        self.hits = self.misses = self.hit_bytes = self.evicted = 0
        self.choice = Choice("minio", 0, "minio: the first epoch has not been read yet")
        self._samples = samples
        self._parts = 0  # sources of each sample; known from the first one
        self._copies: dict[int, Copy] = {}
        self._items: dict[Key, int] = {}  # item of each copy; samples may have a source in common
        self._fields = 0  # number of copies that are fields
        self._policy: CachePolicy = Minio(budget)
        self._begun: Begun | None = None  # an epoch that has begun and is not announced to the policy
        self._at = 0  # position of the next access
        self._since = 0  # the policy counts from this one on
        self._offered = self._nbytes = 0  # copies that were offered, and the memory that they take

    # --- what happens ----------------------------------------------------------------------------------------

    def begin(self, begun: Begun) -> None:
        """Begins an epoch: what follows is wanted by it."""
        self._begun = begun

    def items(self, sample: int, parts: int) -> Sequence[int]:
        """Returns the items of a sample with ``parts`` sources; NO_ITEM for what is never kept: all parts of a sample
        without an index, and those beyond as many as the first sample had.

        To be called once for each wanted sample, before its sources are accessed: it also begins an announced epoch.
        """
        self._parts = self._parts or parts
        if self._begun is not None and self._parts:
            self._start(self._begun)
            self._begun = None
        if not 0 <= sample < self._samples:
            return (NO_ITEM,) * parts
        self._at += max(0, self._parts - parts)  # accesses that there are in the orders
        return [part * self._samples + sample if part < self._parts else NO_ITEM for part in range(parts)]

    def access(self, key: Key) -> tuple[int, Copy | None]:
        """Notes that a source is wanted. Returns the access' position, and the copy of it; None: a miss.

        The copy may be another item's: samples may have a source in common. That of another source of the same item is
        no hit; it stays until the new one is offered.
        """
        now = self._at
        self._at += 1
        item = self._items.get(key, NO_ITEM)
        if item == NO_ITEM:
            self.misses += 1
            return now, None
        return now, self._hit(item, now)

    def may_keep(self, item: int, nbytes: int) -> bool:
        """Returns whether an item of this size may stay if it is read now.

        The policy Minio evicts nothing, so with it there must be room.
        """
        policy = self._policy
        return item != NO_ITEM and (
            not isinstance(policy, Minio) or policy.used_bytes + space_of(nbytes) <= policy.budget
        )

    def look_again(self, key: Key, now: int) -> Copy | None:
        """Returns a copy that was missed at ``now`` and has been kept since: the miss is counted as a hit. None: there
        is still none."""
        item = self._items.get(key, NO_ITEM)
        if item == NO_ITEM:
            return None
        self.misses -= 1
        return self._hit(item, now)

    def _hit(self, item: int, now: int) -> Copy:
        copy = self._copies[item]
        self._policy.used(item, now - self._since)
        self.hits += 1
        self.hit_bytes += copy.nbytes
        return copy

    def was_shared(self) -> None:
        """Notes that what was missed has been read for another sample: neither a hit nor a miss."""
        self.misses -= 1

    def holds(self, key: Key) -> bool:
        """Returns whether there is a copy."""
        return key in self._items

    def skip(self, items: int, *, hits: int = 0, misses: int = 0) -> None:
        """Counts accesses for which nothing is looked up: of ``items`` items, of which so many are hits or misses.

        Neither is one whose bytes are ready for another sample. What kept fields save is a hit; what is read, as fields
        are wanted, is a miss.
        """
        self._at += items
        self.hits += hits
        self.misses += misses

    def offer_fields(self, sample: int, copy: Copy) -> tuple[bool, list[Copy]]:
        """Offers the fields of a sample, which take the place of all that was read for it.

        Returns as ``offer`` does.
        """
        if not self._parts or not 0 <= sample < self._samples or not self.may_keep(sample, copy.nbytes):
            return False, []
        kept, going = self.offer(sample, copy, self._at)
        if kept:
            going += [gone for part in range(1, self._parts) for gone in self._drop(part * self._samples + sample)]
        return kept, going

    def shrink(self, fields: bool, budget: float) -> list[Copy]:
        """Drops fields (or with ``fields=False`` raw bytes) until at most ``budget`` bytes of these are kept.

        Returns the dropped copies, for the caller to free.
        """
        kind = [item for item, copy in self._copies.items() if (copy.key[0] == FIELDS) == fields]
        nbytes = sum(space_of(self._copies[item].nbytes) for item in kind)
        going: list[Copy] = []
        while kind and nbytes > budget:
            copies = self._drop(kind.pop())
            nbytes -= sum(space_of(copy.nbytes) for copy in copies)
            going += copies
        self.evicted += len(going)
        return going

    def _drop(self, item: int) -> list[Copy]:
        self._policy.dropped(item)
        return self._take_out(item)

    def offer(self, item: int, copy: Copy, now: int) -> tuple[bool, list[Copy]]:
        """Offers what was missed at ``now`` and has been read.

        Returns whether it stays, and the copies that go, for the caller to free: those that were evicted, and an older
        copy of the item, which goes even if the new one does not stay. For NO_ITEM, and for a source that is kept as
        another item, that is (False, []).
        """
        if item == NO_ITEM or self._items.get(copy.key, item) != item:
            return False, []
        self._offered += 1
        self._nbytes += space_of(copy.nbytes)
        older = self._drop(item) if item in self._copies else []
        evicted = self._policy.offer(item, space_of(copy.nbytes), now - self._since)
        if evicted is None:
            return False, older
        going = [gone for each in evicted for gone in self._take_out(each)]
        self.evicted += len(going)
        self._copies[item] = copy
        self._items[copy.key] = item
        self._fields += copy.key[0] == FIELDS
        return True, going + older

    def _take_out(self, item: int) -> list[Copy]:
        """Removes and returns the item's copy, if there is one."""
        copy = self._copies.pop(item, None)
        if copy is None:
            return []
        del self._items[copy.key]
        self._fields -= copy.key[0] == FIELDS
        return [copy]

    # --- policies --------------------------------------------------------------------------------------------

    def _start(self, begun: Begun) -> None:
        """Tells the policy of the epoch; another policy may follow from what is known by now."""
        share = 0.5  # nothing is known yet; said anew when the next begins
        if self._nbytes and self._samples:
            share = self.budget / (self._nbytes / self._offered * self._samples * self._parts)
        choice = choose(shards=begun.shards, share=share, known=begun.orders is not None, once=begun.once)
        if choice.policy != self.choice.policy:
            self._change_to(choice.policy)
        self.choice = choice
        orders = None if begun.orders is None else OfItems(begun.orders, self._samples, self._parts)
        start = self._policy.begin(begun.epoch, orders, choice.look_ahead)
        self._at = self._since + start + begun.skipped * self._parts

    def _change_to(self, name: str) -> None:
        policy = NextUse(self.budget, self._samples * self._parts) if name == "next-use" else Minio(self.budget)
        self._policy, self._since = policy, self._at
        for item, copy in self._copies.items():
            policy.offer(item, space_of(copy.nbytes), 0)

    # --- what is said of it ----------------------------------------------------------------------------------

    def count_anew(self) -> None:
        """Sets the counts of hits, misses and evictions to zero."""
        self.hits = self.misses = self.hit_bytes = self.evicted = 0

    def counts(self) -> dict[str, int | str]:
        """Returns hits, misses and what is kept (``stats()["cache"]["memory"]``)."""
        return {
            "policy": self.choice.policy,
            "why": self.choice.why,
            "budget_bytes": self.budget,
            "bytes": self._policy.used_bytes,
            "copies": len(self._copies),
            "fields": self._fields,
            "hits": self.hits,
            "misses": self.misses,
            "hit_bytes": self.hit_bytes,
            "evicted": self.evicted,
        }


@dataclass(frozen=True)
class OfItems:
    """Orders of samples as orders of their items: the parts of a sample are wanted one after the other."""

    orders: Orders
    samples: int
    parts: int

    def order(self, epoch: int) -> Integers | None:
        order = self.orders.order(epoch)
        if order is None or not 0 <= int(order.min(initial=0)) <= int(order.max(initial=0)) < self.samples:
            return None  # a sampler of another data set than there was as the process began
        if self.parts == 1:
            return order
        items: Integers = np.add.outer(order, self.samples * np.arange(self.parts)).ravel()
        return items
