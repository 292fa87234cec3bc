"""Draws the orders of epochs to come for caches, as far as that has no side effects.

What is sent to the reader process draws the orders there, so that no generator of the training process moves: this
rank's order of torch's ``DistributedSampler`` from the sampler's seed; others of torch's samplers from a copy of the
generator that they draw from. Drawing from a sampler of another class ahead of time might move generators, or wait for
other ranks.

A guess that fails costs misses, never content: a cache holds what a source says, whoever reads it and when. Others,
such as a model's dropout, may draw from the global generator in between; then the guess is wrong. A wrong order is
drawn by the same weights, and keeps what comes often; it has as many hits as knowing nothing, or more (simulated:
``python -m benchmarks.caches``).
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import DistributedSampler, RandomSampler, WeightedRandomSampler

from minato_gpu.arguments import Arguments
from minato_gpu.caching.future import Integers, share
from minato_gpu.samples import Value
from minato_gpu.sampling.epoch_batches import EpochBatches
from minato_gpu.sampling.packing import unpacked_state
from minato_gpu.sampling.samplers import STATEFUL_DISTRIBUTED, Sampling, length_of, name_of
from minato_gpu.sources.memory_tier import Begun

_MOST = 1 << 23  # keys of an epoch that is foretold: a microsecond each, before its first sample is looked for
_DRAWN = (RandomSampler, WeightedRandomSampler)


class LookAhead:
    """Describes each epoch that begins for the reader process, with the orders that can be drawn there and are of use.

    Orders are sent of a DistributedSampler; and of a RandomSampler or WeightedRandomSampler of up to 8 million keys,
    unless it yields all keys equally often in each epoch: whatever is kept is then hit every time, so that knowing the
    order gains nothing. Those in which keys may repeat are sent only if the cache ``uses_repeats``.
    """

    def __init__(self, loader: Arguments, *, uses_repeats: bool = True) -> None:
        self._uses_repeats = uses_repeats
        self._sampling = Sampling(loader)
        self._keys = length_of(loader.dataset) or 0
        # the generator that every epoch's seed is drawn from
        self._seeds = None if loader.persistent_workers else loader.generator or torch.default_generator

    def __call__(self, epoch: EpochBatches, *, early: bool = False) -> Begun:
        """Returns the description of an epoch of which nothing has been drawn by this run; its ``orders`` are None if
        none are sent. ``early``: the epoch is drawn before it begins, so its seed is still to be drawn."""
        sampling, sampler = self._sampling, self._sampling.inner
        begun = Begun(epoch.number, None, 1, skipped=epoch.position)
        if sampling.batched and sampling.size is None:
            return begun  # batches are made in ways that nobody knows
        if _is_distributed(sampler):
            return begun._replace(orders=_distributed(sampler, epoch.number), shards=sampler.num_replicas)
        if type(sampler) in _DRAWN and self._is_useful(sampler) and (self._uses_repeats or self._unique_keys(sampler)):
            reads = max(len(sampler), 1)
            if reads <= _MOST:
                orders, once = self._from_generator(sampler, epoch, early), self._unique_keys(sampler)
                return begun._replace(orders=orders, shards=max(self._keys, 1) / reads, once=once)
        return begun

    def _is_useful(self, sampler: Value) -> bool:
        """Returns whether knowing orders helps: an epoch leaves keys out, or has some more often than others."""
        if type(sampler) is RandomSampler:
            return bool(sampler.replacement or sampler.num_samples % len(sampler.data_source))
        return bool(sampler.replacement or sampler.num_samples < len(sampler.weights))

    def _unique_keys(self, sampler: Value) -> bool:
        """Returns whether no key comes twice in an epoch."""
        return self._sampling.is_torch_permutation or (
            type(sampler) is WeightedRandomSampler and not sampler.replacement
        )

    def _from_generator(self, sampler: Value, epoch: EpochBatches, early: bool) -> DrawnOrders:
        generator = torch.default_generator if sampler.generator is None else sampler.generator
        state = generator.get_state()
        if epoch.order.begun_from is not None:  # an earlier run has begun the epoch
            for role, each in self._sampling.generators.items():
                if each is generator and role in epoch.order.begun_from:
                    state = unpacked_state(epoch.order.begun_from[role])
        return DrawnOrders(sampler, epoch.number, state, seeds=self._seeds is generator, early=early)


def _is_distributed(sampler: Value) -> bool:
    """Returns whether the sampler draws as torch's ``DistributedSampler`` does (torchdata's is a class of its own)."""
    inherits = isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__
    return inherits or name_of(sampler) == STATEFUL_DISTRIBUTED


def _distributed(sampler: Value, epoch: int) -> DistributedOrders:
    return DistributedOrders(
        keys=len(sampler.dataset),
        shuffle=sampler.shuffle,
        drop_last=sampler.drop_last,
        seed=sampler.seed,
        rank=sampler.rank,
        ranks=sampler.num_replicas,
        offset=sampler.epoch - epoch,
    )


# --- orders that can be sent ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class DistributedOrders:
    """The orders of a ``DistributedSampler`` over ``keys`` indices: those that ``rank`` reads.

    The epoch that the sampler gets by ``set_epoch`` is taken to be ``offset`` more than the loader's own count: a
    sampler that is never given one yields the same order each time, so that each guess costs misses.
    """

    keys: int
    shuffle: bool
    drop_last: bool
    seed: int
    rank: int
    ranks: int
    offset: int

    def order(self, epoch: int) -> Integers:
        whole = np.arange(self.keys)
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.offset + epoch)
            whole = torch.randperm(self.keys, generator=generator).numpy()
        return share(whole, self.rank, self.ranks, drop_last=self.drop_last)


class DrawnOrders:
    """The orders of one of torch's samplers (``_DRAWN``, no subclasses) from epoch ``first`` on, drawn from a copy of
    its generator.

    Two are equal if one predicts the generator's state with which the other begins: then they yield the same orders.
    """

    def __init__(self, sampler: Value, first: int, state: torch.Tensor, *, seeds: bool, early: bool = False) -> None:
        """``state`` is the generator's state as epoch ``first`` begins.

        ``seeds``: the loader draws a seed from that generator before every order; ``early``: also before the first
        one, as that epoch has not begun yet.
        """
        self.first = first
        self._seeds, self._owns = seeds, sampler.generator is not None
        self._bare = pickle.dumps(_bare(sampler), 5)
        # generator's state before each epoch's order: of epochs drawn so far, and of the next
        self._states = {first: _after_seed(state) if seeds and early else state}

    def order(self, epoch: int) -> Integers | None:
        """Returns the epoch's keys, shape (reads,); None for an epoch before ``first``. Draws all orders up to this one
        that have not been drawn yet, and this one again if it has been."""
        if epoch < self.first:
            return None
        for each in range(max(self._states), epoch):
            self._draw(each)
        return self._draw(epoch)

    def _draw(self, epoch: int) -> Integers:
        sampler = pickle.loads(self._bare)
        with torch.random.fork_rng(devices=()):
            generator = torch.Generator() if self._owns else torch.default_generator
            generator.set_state(self._states[epoch])
            sampler.generator = generator if self._owns else None
            order = np.fromiter(sampler, np.int64)
            state = generator.get_state()
        self._states[epoch + 1] = _after_seed(state) if self._seeds else state
        return order

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DrawnOrders) or self._identity != other._identity:
            return False
        early, late = (self, other) if self.first <= other.first else (other, self)
        foretold = early._states.get(late.first)
        return foretold is not None and torch.equal(foretold, late._states[late.first])

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[bytes, bool, bool]:
        return self._bare, self._seeds, self._owns


def _bare(sampler: Value) -> Value:
    """Returns a copy of the sampler without what is large and does not matter for its orders."""
    bare = copy.copy(sampler)
    bare.generator = None
    if type(bare) is RandomSampler:
        bare.data_source = range(len(bare.data_source))
    else:
        bare.weights = bare.weights.detach().cpu().clone()  # a view would bring all that it is a view of
    return bare


def _after_seed(state: torch.Tensor) -> torch.Tensor:
    """Returns a generator's state after the loader has drawn a seed from it."""
    generator = torch.Generator()
    generator.set_state(state)
    torch.empty((), dtype=torch.int64).random_(generator=generator)
    return generator.get_state()
