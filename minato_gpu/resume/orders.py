"""A sampler's batches, and the way back to the middle of them.

Three ways, the first that fits:

- *state*: the sampler or its iterator has ``state_dict`` and ``load_state_dict``. The loader draws ahead of what it
  delivers, so its state now is not that of what is delivered. While saves come often, it is taken before every batch
  that is drawn. Otherwise nothing is copied, and a save holds the state now and the keys drawn and not delivered.
- *replay*: the order is known to come out the same again: a sequence, or one of torch's own samplers, whose generator
  is kept as it was when the epoch began. The batches delivered before are drawn again and dropped.
- *keys*: nobody knows. What the sampler still has to yield is drawn now and stored.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
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
from minato_gpu.resume import state as s

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
    """An iterator over one epoch's batches (or single keys) that knows the way back.

    ``generators``: those that it may draw from, by role; ``begun_from``: their states just before it did, packed. None
    where it has not begun: a sampler draws its order when it is first asked, and others may draw until then.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        way: str = REPLAY,
        *,
        parts: tuple[Any, Any] = (None, None),
        generators: Mapping[str, torch.Generator] | None = None,
        begun_from: dict[str, str] | None = None,
    ) -> None:
        self.way = way
        self.begun_from = begun_from
        self._batches = batches
        self._sampler, self._iterator = parts  # those of the two that are stateful
        self._generators = generators or {}
        self._next: deque[Any] = deque()
        self._before_next: dict[str, Any] | None = None  # the sampler's state before what was put back

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._before_next = None
        if self._next:
            return self._next.popleft()
        if self.begun_from is None:
            self.begun_from = s.packed_states(self._generators)
        return next(self._batches)

    def put_back(self, item: Any, mark: dict[str, Any] | None = None) -> None:
        """The next one will be ``item``, before which ``mark`` was taken."""
        self._next.appendleft(item)
        self._before_next = mark

    @property
    def waiting(self) -> list[Any]:
        """What has been drawn from the sampler and not been yielded: it comes next."""
        return list(self._next)

    def mark(self) -> dict[str, Any] | None:
        """The state (a copy) before what comes next; None where there is none, or it is not known any more."""
        if self.way != STATE:
            return None
        return self._before_next if self._next else self.state()

    def state(self) -> dict[str, Any]:
        """The sampler's state after all that was drawn from it (a copy); or, as "error", why it could not be had."""
        saved = {"sampler": self._sampler, "iterator": self._iterator}
        try:
            return {name: None if part is None else copy.deepcopy(part.state_dict()) for name, part in saved.items()}
        except Exception as error:  # it matters to nobody but who saves
            return {"error": f"the sampler's state_dict(): {type(error).__name__}: {error}"}

    def generator_states(self) -> dict[str, str]:
        """What the generators must be set to for this way back, packed: keys that are stored are not drawn again."""
        if self.way == KEYS or self.begun_from is None:
            return s.packed_states(self._generators)
        return self.begun_from

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


def fresh_order(sampling: Sampling, batches: Iterator[Any], generators: Mapping[str, torch.Generator]) -> Order:
    """The order of an epoch that begins. ``batches``: an iterator over the loader's batch sampler, not yet advanced."""
    if sampling.replays:
        return Order(batches, generators=generators)
    begun_from = s.packed_states(generators)  # iter() may draw
    keys = iter(sampling.inner) if sampling.size is not None else batches
    return _known_or_stored(sampling, keys, generators, begun_from)


def order_from_state(
    sampling: Sampling,
    saved: dict[str, Any],
    generators: Mapping[str, torch.Generator],
    begun_from: dict[str, str],
    *,
    ended: bool,
) -> Order:
    """The order from where the sampler's own state says; ``ended``: nothing, and the state is that of its next epoch.

    Raises ValueError where it does not take that state.
    """
    load_sampler_state(sampling, saved)
    if ended:
        sampler = sampling.inner if is_stateful(sampling.inner) else None
        return Order(iter(()), STATE, parts=(sampler, None), generators=generators, begun_from=begun_from)
    keys = iter(sampling.inner)
    if saved["iterator"] is not None:
        if not is_stateful(keys):
            raise ValueError("the state holds one of the sampler's iterator, but this sampler's iterator takes none")
        keys.load_state_dict(saved["iterator"])
    return _known_or_stored(sampling, keys, generators, begun_from)


def load_sampler_state(sampling: Sampling, saved: dict[str, Any]) -> None:
    """Give the sampler its own state back."""
    if saved["sampler"] is not None:
        if not is_stateful(sampling.inner):
            raise ValueError(f"the state holds one of the sampler, but {type(sampling.inner).__name__} takes none")
        sampling.inner.load_state_dict(saved["sampler"])


def _known_or_stored(
    sampling: Sampling, keys: Iterator[Any], generators: Mapping[str, torch.Generator], begun_from: dict[str, str]
) -> Order:
    sampler = sampling.inner if is_stateful(sampling.inner) else None
    iterator = keys if is_stateful(keys) else None
    way = KEYS if sampler is None and iterator is None else STATE
    return Order(sampling.cut(keys), way, parts=(sampler, iterator), generators=generators, begun_from=begun_from)


def replayed_order(sampling: Sampling, default_state: torch.Tensor | None, begun_from: dict[str, str]) -> Order:
    """The order of an epoch from its beginning once more; the generators are as they were then, but the global one.

    ``default_state``: that one's state then, for a sampler that draws from it; it is left as it is now. Torch's
    samplers draw when they yield their first key, so that is done here, before anybody else can draw.
    """
    batches = sampling.cut(sampling.inner)
    outside = torch.get_rng_state()
    try:
        if default_state is not None:
            torch.set_rng_state(default_state)
        first = list(islice(batches, 1))
    finally:
        torch.set_rng_state(outside)
    order = Order(batches, begun_from=begun_from)
    for item in first:
        order.put_back(item)
    return order
