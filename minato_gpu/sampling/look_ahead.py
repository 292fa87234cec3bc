"""The orders of epochs to come, for caches: as far as they can be drawn without side effects.

torch's ``DistributedSampler`` tells them from its seed, for every rank; others of torch's samplers from a copy of the
generator that they draw from (drawn_orders.py). What a sampler of another class does, nobody knows: drawing from it may
move generators, or wait for other ranks. It may tell its orders itself (told_orders.py).

A guess that fails costs misses, never content: a cache holds what a source says, whoever reads it and when.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import DistributedSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from minato_gpu.arguments import Arguments
from minato_gpu.caching.future import Integers
from minato_gpu.caching.orders import Orders, share
from minato_gpu.packing import unpacked_state
from minato_gpu.samples import Value
from minato_gpu.sampling.drawn_orders import KINDS, DrawnOrders
from minato_gpu.sampling.samplers import STATEFUL_DISTRIBUTED, Sampling, length_of, name_of
from minato_gpu.sampling.sources import Source
from minato_gpu.sampling.told_orders import Counted, ToldOrders, count_of, told_by
from minato_gpu.sources.memory_tier import Begun

_MOST = 1 << 23  # keys of an epoch that is foretold: a microsecond each, before its first sample is looked for


@dataclass(frozen=True)
class DistributedOrders:
    """The orders of a ``DistributedSampler`` over ``keys`` indices: what ``rank`` reads.

    The epoch that the sampler is told (``set_epoch``) is ``first`` plus ``stride`` times the loader's own count.
    """

    keys: int
    shuffle: bool
    drop_last: bool
    seed: int
    rank: int
    ranks: int
    first: int
    stride: int

    def order(self, epoch: int) -> Integers:
        whole = np.arange(self.keys)
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.first + self.stride * epoch)
            whole = torch.randperm(self.keys, generator=generator).numpy()
        return share(whole, self.rank, self.ranks, drop_last=self.drop_last)


@dataclass(frozen=True)
class FixedOrder:
    """The same keys in every epoch."""

    keys: tuple[int, ...]

    def order(self, epoch: int) -> Integers:
        return np.asarray(self.keys, np.int64)


class LookAhead:
    """What a reader process is told of each epoch that begins.

    Of a sampler that yields each key once in an epoch, or any fixed number of times, nothing is told: whatever is kept
    is hit every time, so that no order is better than another. Nor is of orders in which keys may come ``twice``,
    unless those are of use.
    """

    def __init__(self, loader: Arguments, *, twice: bool = True) -> None:
        self._twice = twice
        self._sampling = Sampling(loader)
        self._keys = length_of(loader.dataset) or 0
        # the generator that every epoch's seed is drawn from
        self._seeds = None if loader.persistent_workers else loader.generator or torch.default_generator
        self._before: Counted | None = None
        self._repeats: tuple[Value, bool] | None = None  # whether these indices have one twice

    def __call__(self, source: Source, *, early: bool = False) -> Begun:
        """``source``: of the epoch, of which nothing has been drawn, but for what an earlier run did; ``early``: it is
        drawn ahead of its beginning."""
        sampling, sampler = self._sampling, self._sampling.inner
        self._before = count = count_of(sampling.told_epoch, source.number, self._before)
        begun = Begun(source.number, None, 1, skipped=source.position)
        if self._twice and (told := told_by(sampler)) is not None:
            return self._drawn(begun, ToldOrders(told, count.first, count.stride))
        if sampling.batched and sampling.size is None:
            return begun  # batches are made in ways that nobody knows
        if _is_distributed(sampler):
            return begun._replace(orders=_distributed(sampler, count), shards=sampler.num_replicas)
        if type(sampler) in KINDS and self._pays(sampler) and (self._twice or self._once(sampler)):
            return self._drawn(begun, self._from_generator(sampler, source, early), once=self._once(sampler))
        if self._twice and type(sampler) in (list, tuple) and self._pays(sampler) and _are_keys(sampler):
            return self._drawn(begun, FixedOrder(tuple(sampler)))
        return begun

    def _drawn(self, begun: Begun, orders: Orders, *, once: bool = False) -> Begun:
        reads = length_of(self._sampling.inner) or self._keys
        if self._sampling.batched and self._sampling.size is None:
            reads = self._keys  # its length is one in batches
        shards = max(self._keys, 1) / max(reads, 1)
        return begun if reads > _MOST else begun._replace(orders=orders, shards=shards, once=once)

    def _pays(self, sampler: Value) -> bool:
        """Whether an epoch leaves something out, or has something more often than the rest."""
        if type(sampler) is RandomSampler:
            return bool(sampler.replacement or sampler.num_samples % len(sampler.data_source))
        if type(sampler) is WeightedRandomSampler:
            return bool(sampler.replacement or sampler.num_samples < len(sampler.weights))
        indices = sampler.indices if type(sampler) is SubsetRandomSampler else sampler
        if self._repeats is None or self._repeats[0] is not indices:
            self._repeats = indices, length_of(indices) is not None and len(set(indices)) < len(indices)
        return self._repeats[1]

    def _once(self, sampler: Value) -> bool:
        """Whether no key comes twice in an epoch."""
        return self._sampling.never_repeats or (type(sampler) is WeightedRandomSampler and not sampler.replacement)

    def _from_generator(self, sampler: Value, source: Source, early: bool) -> DrawnOrders:
        generator = torch.default_generator if sampler.generator is None else sampler.generator
        state = generator.get_state()
        if source.order.begun_from is not None:  # an earlier run has begun the epoch
            for role, each in self._sampling.generators.items():
                if each is generator and role in source.order.begun_from:
                    state = unpacked_state(source.order.begun_from[role])
        return DrawnOrders(sampler, source.number, state, seeds=self._seeds is generator, early=early)


def _are_keys(sampler: Value) -> bool:
    return all(type(key) is int for key in sampler)


def _is_distributed(sampler: Value) -> bool:
    """Also one of a class of its own, which draws as torch's does."""
    inherits = isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__
    return inherits or name_of(sampler) == STATEFUL_DISTRIBUTED


def _distributed(sampler: Value, count: Counted) -> DistributedOrders:
    return DistributedOrders(
        keys=len(sampler.dataset),
        shuffle=sampler.shuffle,
        drop_last=sampler.drop_last,
        seed=sampler.seed,
        rank=sampler.rank,
        ranks=sampler.num_replicas,
        first=count.first,
        stride=count.stride,
    )
