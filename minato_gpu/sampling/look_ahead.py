"""The orders of epochs to come, for caches: as far as they can be drawn without side effects.

torch's ``DistributedSampler`` tells them from its seed, for every rank; others of torch's samplers from a copy of a
generator of their own. From the global generator others draw too (a model's dropout, for one), so what a sampler will
get of it is not known; neither is what a sampler of another kind does.

A guess that fails costs misses, never content: a cache holds what a source says, whoever reads it and when.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from minato_gpu.caching.future import Integers
from minato_gpu.caching.orders import Orders, merged, share
from minato_gpu.samples import Key, Value
from minato_gpu.sampling.samplers import Sampling, length_of
from minato_gpu.sources.memory_tier import Begun

_STATEFUL = "torchdata.stateful_dataloader.sampler.StatefulDistributedSampler"


@dataclass(frozen=True)
class DistributedOrders:
    """The orders of a ``DistributedSampler`` over ``keys`` indices. ``step``: None for what ``rank`` alone reads; for
    ranks that share a directory the samples of a batch, and the orders are those of all ranks together.

    The epoch that the sampler is told (``set_epoch``) is ``first`` plus ``stride`` times the loader's own count.
    """

    keys: int
    shuffle: bool
    drop_last: bool
    seed: int
    rank: int
    ranks: int
    step: int | None
    first: int
    stride: int

    def order(self, epoch: int) -> Integers:
        whole = np.arange(self.keys)
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.first + self.stride * epoch)
            whole = torch.randperm(self.keys, generator=generator).numpy()
        if self.step is None:
            return share(whole, self.rank, self.ranks, drop_last=self.drop_last)
        each = [share(whole, rank, self.ranks, drop_last=self.drop_last) for rank in range(self.ranks)]
        return merged(each, self.step)


class DrawnOrders:
    """The orders that one of torch's samplers will draw from its own generator, from epoch ``first`` on.

    ``draws_seed``: the loader draws each epoch's seed from the same generator, before the order.
    """

    def __init__(self, sampler: Value, first: int, *, draws_seed: bool) -> None:
        self._generator: torch.Generator = sampler.generator
        self._sampler, self._length = sampler, length_of(sampler)
        self._twin = copy.copy(sampler)
        self._twin.generator = torch.Generator()
        self._twin.generator.set_state(self._generator.get_state())
        self._draws_seed = draws_seed
        self._drawn: dict[int, Integers | None] = {}
        self._before = {first: self._generator.get_state()}  # of these epochs, and of the next one that will be drawn

    def order(self, epoch: int) -> Integers | None:
        while min(self._before) <= epoch and epoch not in self._drawn:
            self._draw(max(self._before))
        return self._drawn.get(epoch)

    def _draw(self, epoch: int) -> None:
        self._drawn[epoch] = _whole_numbers(self._twin)
        if self._draws_seed:
            torch.empty((), dtype=torch.int64).random_(generator=self._twin.generator)
        self._before[epoch + 1] = self._twin.generator.get_state()

    def holds(self, sampler: Value, epoch: int) -> bool:
        """Whether the epoch that now begins will be as it was drawn; those before it are forgotten."""
        self._drawn = {number: keys for number, keys in self._drawn.items() if number >= epoch}
        self._before = {number: state for number, state in self._before.items() if number >= epoch}
        same = sampler is self._sampler and sampler.generator is self._generator and length_of(sampler) == self._length
        return same and epoch in self._before and torch.equal(self._before[epoch], self._generator.get_state())


@dataclass(frozen=True)
class FixedOrder:
    """The same keys in every epoch."""

    keys: tuple[int, ...] | range

    def order(self, epoch: int) -> Integers:
        return np.asarray(self.keys, np.int64)


def orders_ahead(
    sampling: Sampling,
    epoch: int,
    before: Orders | None = None,
    *,
    step: int | None = None,
    seeds: torch.Generator | None = None,
) -> Orders | None:
    """What is known, in the sampler's keys, when epoch ``epoch`` begins, just before its order is drawn; None: nothing.

    ``before``: what was returned for the epoch before. ``step``: see ``DistributedOrders``; of ranks that share a
    directory and have another sampler nothing is known. ``seeds``: the generator that the loader draws the seed of
    every epoch from, if it does.
    """
    sampler = sampling.inner
    if sampling.batched and sampling.size is None:
        return None
    if type(sampler) is DistributedSampler or _name(sampler) == _STATEFUL:
        return _distributed(sampler, epoch, before, step)
    if step is not None:
        return None
    if type(sampler) is SequentialSampler:
        return FixedOrder(range(len(sampler)))
    if type(sampler) in (list, tuple, range):
        return None if (keys := _whole_numbers(sampler)) is None else FixedOrder(tuple(keys.tolist()))
    if type(sampler) not in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler) or sampler.generator is None:
        return None
    if isinstance(before, DrawnOrders) and before.holds(sampler, epoch):
        return before
    return DrawnOrders(sampler, epoch, draws_seed=seeds is sampler.generator)


class SharesAhead:
    """What a reader process is told of each epoch that begins: the orders of a rank's shares.

    Of one reader of the whole set nothing need be known: whatever is kept is hit once in every epoch.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._before: Orders | None = None

    def __call__(self, epoch: int) -> Begun:
        sampler = self._sampling.inner
        orders = None
        if isinstance(sampler, DistributedSampler):
            orders = self._before = orders_ahead(self._sampling, epoch, self._before)
        return Begun(epoch, orders, orders.ranks if isinstance(orders, DistributedOrders) else 1)


def _distributed(sampler: Value, epoch: int, before: Orders | None, step: int | None) -> DistributedOrders:
    stride = 1
    if isinstance(before, DistributedOrders) and before.first + before.stride * (epoch - 1) == sampler.epoch:
        stride = 0  # nobody has called set_epoch: every epoch is the same
    return DistributedOrders(
        keys=len(sampler.dataset),
        shuffle=sampler.shuffle,
        drop_last=sampler.drop_last,
        seed=sampler.seed,
        rank=sampler.rank,
        ranks=sampler.num_replicas,
        step=step,
        first=sampler.epoch - stride * epoch,
        stride=stride,
    )


def _whole_numbers(keys: Iterable[Key]) -> Integers | None:
    """The keys as an array, shape (keys,); None where one of them is something else than a whole number."""
    listed = list(keys)
    if not all(type(key) is int for key in listed):
        return None
    return np.array(listed, np.int64)


def _name(sampler: Value) -> str:
    return f"{type(sampler).__module__}.{type(sampler).__qualname__}"
