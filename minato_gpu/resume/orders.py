"""A sampler's batches, and the way back to the middle of them.

Three ways, the first that fits:

- *state*: the sampler or its iterator has ``state_dict`` and ``load_state_dict``. Its state is taken before every
  batch that is drawn, because the loader draws ahead of what it delivers.
- *replay*: the order is known to come out the same again: a sequence, or one of torch's own samplers, whose generator
  is kept as it was when the epoch began. The batches delivered before are drawn again and dropped.
- *keys*: nobody knows. What the sampler still has to yield is drawn now and stored.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from minato_gpu.lanes.streams import is_stateful

STATE, REPLAY, KEYS = "state", "replay", "keys"
MOST_KEYS = 1 << 24
"""So many remaining keys are stored; a sampler with more (an endless one, say) must have a state of its own."""

_REPLAYED = (
    *(SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler),
    *(list, tuple, range),
)


class Sampling:
    """What yields a loader's keys: ``inner`` keys that are cut into batches of ``size``, or (None) whatever it yields.

    torch's exact ``BatchSampler`` only cuts, so what counts is the sampler inside it.
    """

    def __init__(self, loader: Any) -> None:
        batches = loader.batch_sampler
        self.size: int | None = None
        self.drop_last = False
        self.inner: Any = loader.sampler if batches is None else batches
        if type(batches) is BatchSampler:
            self.inner, self.size, self.drop_last = batches.sampler, batches.batch_size, batches.drop_last

    @property
    def replays(self) -> bool:
        """Whether the order is known to come out the same again."""
        return not is_stateful(self.inner) and type(self.inner) in _REPLAYED

    @property
    def _shares(self) -> bool:
        """Whether the sampler's length is one rank's share, which another number of ranks changes."""
        return type(self.inner) is DistributedSampler

    @property
    def uses_default_generator(self) -> bool:
        """Whether the order is drawn from torch's global generator."""
        return getattr(self.inner, "generator", self) is None

    def cut(self, keys: Iterable[Any]) -> Iterator[Any]:
        """Batches of the keys, as torch's BatchSampler cuts them; or what the user's own sampler yields."""
        return iter(keys) if self.size is None else _cut(iter(keys), self.size, self.drop_last)

    def describe(self) -> dict[str, Any]:
        """What a saved state and the loader that takes it must agree on."""
        try:
            length: int | None = len(getattr(self.inner, "dataset", self.inner) if self._shares else self.inner)
        except TypeError:
            length = None
        return {
            "sampler": type(self.inner).__name__,
            "length": length,
            **self.cutting,
        }

    @property
    def cutting(self) -> dict[str, Any]:
        """How keys, or the samples of an iterable data set, become batches."""
        return {"batch_size": self.size, "drop_last": self.drop_last}


def _cut(keys: Iterator[Any], size: int, drop_last: bool) -> Iterator[list[Any]]:
    while batch := list(islice(keys, size)):
        if len(batch) == size or not drop_last:
            yield batch


class Order:
    """An iterator over one epoch's batches (or single keys) that knows the way back."""

    def __init__(self, batches: Iterator[Any], way: str = REPLAY, *, parts: tuple[Any, Any] = (None, None)) -> None:
        self.way = way
        self._batches = batches
        self._sampler, self._iterator = parts  # those of the two that are stateful
        self._next: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._next.popleft() if self._next else next(self._batches)

    def put_back(self, item: Any) -> None:
        """The next one will be ``item``."""
        self._next.appendleft(item)

    def mark(self) -> dict[str, Any] | None:
        """The sampler's state now (a copy), if it has one; or, as "error", why it could not be had."""
        if self.way != STATE:
            return None
        saved = {"sampler": self._sampler, "iterator": self._iterator}
        try:
            return {name: None if part is None else copy.deepcopy(part.state_dict()) for name, part in saved.items()}
        except Exception as error:  # it matters to nobody but who saves
            return {"error": f"the sampler's state_dict(): {type(error).__name__}: {error}"}

    def rest(self) -> list[Any]:
        """All that is still to come, drawn now; it will be yielded all the same. Raises ValueError for too many."""
        room = MOST_KEYS - len(self._next)
        self._next.extend(islice(self._batches, max(0, room)))
        if len(self._next) >= MOST_KEYS:
            raise ValueError(
                f"the sampler still yields {MOST_KEYS} items or more, too many to store in a state; give it "
                "state_dict() and load_state_dict(), which the loader then uses"
            )
        return list(self._next)


def fresh_order(sampling: Sampling, batches: Iterator[Any]) -> Order:
    """The order of an epoch that begins. ``batches``: an iterator over the loader's batch sampler, not yet advanced."""
    if sampling.replays:
        return Order(batches)
    keys = iter(sampling.inner) if sampling.size is not None else batches
    return _known_or_stored(sampling, keys)


def order_from_state(sampling: Sampling, saved: dict[str, Any]) -> Order:
    """The order from where the sampler's own state says. Raises ValueError where it does not take that state."""
    load_sampler_state(sampling, saved)
    keys = iter(sampling.inner)
    if saved["iterator"] is not None:
        if not is_stateful(keys):
            raise ValueError("the state holds one of the sampler's iterator, but this sampler's iterator takes none")
        keys.load_state_dict(saved["iterator"])
    return _known_or_stored(sampling, keys)


def load_sampler_state(sampling: Sampling, saved: dict[str, Any]) -> None:
    """Give the sampler its own state back."""
    if saved["sampler"] is not None:
        if not is_stateful(sampling.inner):
            raise ValueError(f"the state holds one of the sampler, but {type(sampling.inner).__name__} takes none")
        sampling.inner.load_state_dict(saved["sampler"])


def _known_or_stored(sampling: Sampling, keys: Iterator[Any]) -> Order:
    sampler = sampling.inner if is_stateful(sampling.inner) else None
    iterator = keys if is_stateful(keys) else None
    way = KEYS if sampler is None and iterator is None else STATE
    return Order(sampling.cut(keys), way, parts=(sampler, iterator))


def replayed_order(sampling: Sampling, default_state: torch.Tensor | None) -> Order:
    """The order of an epoch from its beginning once more.

    ``default_state``: the global generator's state then, for a sampler that draws from it; torch's samplers do so
    when they yield their first key, and it is left as it is now.
    """
    batches = sampling.cut(sampling.inner)
    if default_state is None:
        return Order(batches)
    outside = torch.get_rng_state()
    torch.set_rng_state(default_state)
    try:
        first = list(islice(batches, 1))
    finally:
        torch.set_rng_state(outside)
    order = Order(batches)
    for item in first:
        order.put_back(item)
    return order
