"""Draws the order of the next epoch before it begins, from a sampler that can be drawn without side effects.

The generators are put back as they were. When the epoch really begins, what was drawn is used only if they still are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch

from minato_gpu.arguments import Arguments
from minato_gpu.samples import Value
from minato_gpu.sampling.packing import packed_state
from minato_gpu.sampling.samplers import Sampling

T = TypeVar("T")


class Speculation:
    """The next epoch's order and seed, drawn early. Iterating over it yields the sampler's batches.

    As long as the epoch has not begun, every draw happens on states of its own: the generators are put back to what
    they were. ``adopt`` then leaves them as drawing the same now would have left them.
    """

    def __init__(self, loader: Arguments, *, draws_seed: bool) -> None:
        self._generators = _generators(loader)
        self._before = self._states = [g.get_state() for g in self._generators]
        self._ahead = True
        self.seed = 0
        if draws_seed:
            seed = torch.empty((), dtype=torch.int64)
            self.seed = int(self._apart(lambda: seed.random_(generator=loader.generator)).item())
        self._begun_from = self._states
        sampler: Value = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._order = self._apart(lambda: iter(sampler))

    def __iter__(self) -> Iterator[Value]:
        return self

    def __next__(self) -> Value:
        return self._apart(lambda: next(self._order)) if self._ahead else next(self._order)

    def _apart(self, act: Callable[[], T]) -> T:
        outside = [g.get_state() for g in self._generators]
        self._set(self._states)
        try:
            return act()
        finally:
            self._states = [g.get_state() for g in self._generators]
            self._set(outside)

    def _set(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def begun_from(self, generators: Mapping[str, torch.Generator]) -> dict[str, str]:
        """Returns the states of these generators just before the order was drawn, packed, by role; of those alone that
        it draws from."""
        pairs = list(zip(self._generators, self._begun_from, strict=True))
        return {role: packed_state(s) for role, own in generators.items() for generator, s in pairs if generator is own}

    def holds(self) -> bool:
        """Returns whether the epoch would be drawn exactly like this if it began now."""
        return all(torch.equal(g.get_state(), s) for g, s in zip(self._generators, self._before, strict=True))

    def adopt(self) -> None:
        """Begins the epoch: from now on the sampler draws from the generators themselves."""
        self._ahead = False
        self._set(self._states)


def _generators(loader: Arguments) -> list[torch.Generator]:
    given = (loader.generator, Sampling(loader).generator)
    return list(dict.fromkeys(torch.default_generator if each is None else each for each in given))
