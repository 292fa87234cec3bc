"""The orders that torch's samplers will draw, foretold from the state of the generator that they draw from.

What is told is small, or as large as the sampler's weights: the sampler without its data set and its generator, and the
generator's state as an epoch begins. Whoever needs the orders draws them (in the reader process, see sources/), from a
generator of its own, so that nothing here moves one that others draw from.

Of the global generator others may draw in between, a model's dropout for one: then what is foretold of the epochs after
the current one is wrong. That does no harm: a wrong order is drawn by the same weights, and keeps what comes often; it
has as many hits as knowing nothing, or more (simulated, see caching/README.md).
"""

from __future__ import annotations

import copy
import pickle

import numpy as np
import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from minato_gpu.caching.future import Integers
from minato_gpu.samples import Value

KINDS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class DrawnOrders:
    """The orders of one of these samplers (``KINDS``, none of their heirs) from epoch ``first`` on.

    ``state``: its generator's as that epoch begins. ``seeds``: the loader draws a seed from the same generator, before
    every order; ``early``: also for the first, as that epoch has not begun yet. Two are equal if one foretells the
    state that the other begins with: then they tell the same.
    """

    def __init__(self, sampler: Value, first: int, state: torch.Tensor, *, seeds: bool, early: bool = False) -> None:
        self.first = first
        self._seeds, self._owns = seeds, sampler.generator is not None
        self._bare = pickle.dumps(_bare(sampler), 5)
        # just before the orders of epochs are drawn, as far as they have been, and that of the next
        self._states = {first: _after_seed(state) if seeds and early else state}

    def order(self, epoch: int) -> Integers | None:
        """See ``Orders``. Orders that are asked for one after the other are drawn once."""
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
        if not isinstance(other, DrawnOrders) or self._told != other._told:
            return False
        early, late = (self, other) if self.first <= other.first else (other, self)
        foretold = early._states.get(late.first)
        return foretold is not None and torch.equal(foretold, late._states[late.first])

    def __hash__(self) -> int:
        return hash(self._told)

    @property
    def _told(self) -> tuple[bytes, bool, bool]:
        return self._bare, self._seeds, self._owns


def _bare(sampler: Value) -> Value:
    """The sampler without what is large and does not matter."""
    bare = copy.copy(sampler)
    bare.generator = None
    if type(bare) is RandomSampler:
        bare.data_source = range(len(bare.data_source))
    elif type(bare) is SubsetRandomSampler:
        bare.indices = np.asarray(bare.indices, np.int64)  # type: ignore[assignment]
    else:
        bare.weights = bare.weights.detach().cpu().clone()  # a view would bring all that it is a view of
    return bare


def _after_seed(state: torch.Tensor) -> torch.Tensor:
    """The state after the loader has drawn a seed."""
    generator = torch.Generator()
    generator.set_state(state)
    torch.empty((), dtype=torch.int64).random_(generator=generator)
    return generator.get_state()
