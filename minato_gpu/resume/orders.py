"""A sampler's batches, and the way back to the middle of them.

Three ways, the first that fits:

- *state*: the sampler or its iterator has ``state_dict`` and ``load_state_dict``. The loader draws ahead of what it
  delivers, so its state now is not that of what is delivered. While saves come often, it is taken before every batch
  that is drawn. Otherwise nothing is copied. A save holds the first state taken since what is to be delivered next (or
  the state now), and the keys drawn between the two.
- *replay*: the order is known to come out the same again: a sequence, or one of torch's own samplers, whose generator
  is kept as it was when the epoch began. The batches delivered before are drawn again and dropped.
- *keys*: nobody knows. What the sampler still has to yield is drawn now and stored.

Samplers may apply a state only when they are asked for a key, and till then tell an old one (torchdata's
``StatefulDistributedSampler`` does). So none is asked for its state between iter() and its first key, and what it is
given is applied before anything else is done with it: by drawing what comes next. A state taken at the end of an epoch
is applied by a pass that yields nothing; where it yields, the state was the next epoch's already, and is given again.

A sampler that goes on from its state may draw its order once more, from the generator as it was when the epoch began,
or go on drawing from the generator as it was then. Which of the two, nobody says: so where the generator has moved, a
state says what came next, and that must come again. Of few keys both may yield the same, so a state also says how that
leaves the generator, where nobody else has drawn from it since.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple
from zlib import crc32

import torch

from minato_gpu.lanes.streams import is_stateful
from minato_gpu.resume import state as s
from minato_gpu.resume.sampling import Sampling
from minato_gpu.samples import witness_of
from minato_gpu.snapshots import Snapshot

STATE, REPLAY, KEYS = "state", "replay", "keys"
MOST_KEYS = 1 << 24
"""So many remaining keys are stored; a sampler with more (an endless one, say) must have a state of its own."""


class Taken(NamedTuple):
    """States of the sampler, its iterator and the sampler nested in it (of those that have one), and of the generators.

    ``error``: why they could not be had.
    """

    own: Snapshot
    generators: dict[str, torch.Tensor]
    error: str | None = None


Coming = tuple[Taken | None, Any]
"""What a sampler has yielded, and the state before that, where it is known."""


class Following(NamedTuple):
    """What came after a state: so many items, whose keys have this witness, and the generators after them this digest
    (None: not known)."""

    items: int
    witness: int
    generators: int | None = None


ENOUGH = 16
"""So many keys tell what came next; ``witness_of`` looks at no more."""


class Order:
    """An iterator over one epoch's batches (or single keys) that knows the way back.

    ``generators``: those that it may draw from, by role; ``begun_from``: their states just before it did, packed. None
    where it has not begun: a sampler draws its order when it is first asked, and others may draw until then.
    ``known``: the state before the first item, which the sampler itself may not tell: the one that it was given.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        way: str = REPLAY,
        *,
        parts: tuple[Any, Any, Any] = (None, None, None),
        generators: Mapping[str, torch.Generator] | None = None,
        begun_from: dict[str, str] | None = None,
        known: Taken | None = None,
    ) -> None:
        self.way = way
        self.begun_from = begun_from
        self.coming: deque[Coming] = deque()  # drawn from the sampler and not yielded: it comes next
        self.ended = False  # the sampler has said so; it is not asked again, as it may then begin anew
        self.untold: Snapshot | None = None  # states given for the next iter(): until then the samplers may tell others
        self._batches = batches
        self._parts = dict(zip(("sampler", "iterator", "nested"), parts, strict=True))  # None where not stateful
        self._generators = generators or {}
        self._known = known
        self._begun = False  # it has been asked for something, so that it tells its state
        self._raised: Exception | None = None  # by the sampler, when it was asked ahead of need
        self._before: Taken | None = None  # what was last drawn, or should have been

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.draw()[1]

    def draw(self, *, keep: bool = False) -> Coming:
        """The next item and, with ``keep``, the state before it. Raises StopIteration at the end."""
        return self.coming.popleft() if self.coming else self._draw(keep=keep)

    def _draw(self, *, keep: bool) -> Coming:
        if self.ended:
            raise StopIteration
        if self._raised is not None:
            raised, self._raised = self._raised, None
            raise raised
        before = self._known
        if self._begun:
            before = self._take() if keep and self.way == STATE else None
        elif self.begun_from is None:
            self.begun_from = s.packed_states(self._generators)
        self._before = before
        try:
            item = next(self._batches)
        except StopIteration:
            self.ended = self._begun = True
            raise
        self._begun = True
        return before, item

    def draw_ahead(self) -> None:
        """Draw one item, which comes next; where there is none, the sampler is at its end."""
        with suppress(StopIteration):
            self.coming.append(self._draw(keep=False))

    def begin(self) -> None:
        """Let the sampler tell its state, unless that is known: the first item is drawn now, if none has been."""
        if not self._begun and self._known is None:
            self.draw_ahead()

    def foresee(self) -> Coming | None:
        """The item after all that was drawn from the sampler, with the state before it; it comes after those. None at
        the end, also where the sampler raises: then who draws it sees that."""
        try:
            self.coming.append(self._draw(keep=True))
        except StopIteration:
            return None
        except Exception as error:
            self._raised = error
            return None
        return self.coming[-1]

    @property
    def moved(self) -> bool:
        """Whether the generators have moved since just before the order was drawn."""
        return self.begun_from is not None and s.packed_states(self._generators) != self.begun_from

    @property
    def digest(self) -> int:
        """Of the generators' states now."""
        return _digest(self._generators)

    def put_back(self, item: Any, before: Taken | None = None) -> None:
        """The next one will be ``item``; ``before``: the state before that."""
        self.coming.appendleft((before, item))

    def state(self) -> Taken:
        """The state after all that was drawn from the sampler; if that is nothing yet, the first item is drawn now."""
        self.begin()
        if self._raised is not None and self._before is not None:
            return self._before
        return self._take() if self._begun or self._known is None else self._known

    def _take(self) -> Taken:
        generators = {role: generator.get_state() for role, generator in self._generators.items()}
        try:
            own = {name: None if part is None else part.state_dict() for name, part in self._parts.items()}
            return Taken(Snapshot(own), generators)
        except Exception as error:  # it matters to nobody but who saves
            return Taken(Snapshot(None), {}, f"the sampler's state_dict(): {type(error).__name__}: {error}")

    def generator_states(self) -> dict[str, str]:
        """What the generators must be set to for this way back, packed: keys that are stored are not drawn again."""
        if self.way == KEYS or self.begun_from is None:
            return s.packed_states(self._generators)
        return self.begun_from

    def rest(self) -> list[Any]:
        """All that is still to come, drawn now; it will be yielded all the same. Raises ValueError for too many."""
        if not self.ended:
            self.coming.extend((None, item) for item in islice(self._batches, max(0, MOST_KEYS - len(self.coming))))
            self.ended = len(self.coming) < MOST_KEYS
        if len(self.coming) >= MOST_KEYS:
            raise ValueError(
                f"the sampler still yields {MOST_KEYS} items or more, too many to store in a state; give it "
                "state_dict() and load_state_dict(), which the loader then uses"
            )
        return [item for _, item in self.coming]


def fresh_order(sampling: Sampling, batches: Iterator[Any], generators: Mapping[str, torch.Generator]) -> Order:
    """The order of an epoch that begins. ``batches``: an iterator over the loader's batch sampler, not yet advanced."""
    if sampling.replays:
        return Order(batches, generators=generators)
    begun_from = s.packed_states(generators)  # iter() may draw
    keys = iter(sampling.inner) if sampling.size is not None else batches
    return _known_or_stored(sampling, keys, generators, begun_from)


def order_from_state(
    sampling: Sampling,
    own: Snapshot,
    generators: Mapping[str, torch.Generator],
    taken: Mapping[str, torch.Tensor],
    *,
    ended: bool,
    following: Following | None = None,
    batched: bool = True,
) -> Order:
    """The order from where the sampler's own state says; ``ended``: nothing, and the state is one of an epoch's end.

    The generators are as they were when the epoch began; ``taken``: their states when the sampler's was taken. A
    sampler that draws something once more on its way back needs the former, any other goes on from the latter: what is
    ``following`` tells. ``batched``: an item is a list of keys. Raises ValueError where the sampler does not take that
    state, or something else follows.
    """
    begun_from = {role: generator.get_state() for role, generator in generators.items()}
    packed = {role: s.packed_state(state) for role, state in begun_from.items()}
    known = Taken(own, {**begun_from, **taken})
    if ended:
        order = Order(iter(()), STATE, generators=generators, begun_from=packed, known=known)
        order.untold = load_ended(sampling, own, generators, known.generators)
        order.ended = True
        return order

    def begun() -> Order:
        _load_sampler(sampling, own)
        order = _known_or_stored(sampling, _iterator(sampling, own), generators, packed, known)
        order.draw_ahead()
        for _ in range(1, following.items if following is not None else 1):
            order.foresee()
        return order

    order = begun()
    follows = following is None or _follows(order, following, batched)
    if not follows or not _left_alike(following, generators):
        del order  # what its iterator does when it is dropped it does now
        _set(generators, known.generators)
        order = begun()
        assert following is not None
        if _follows(order, following, batched) and (not follows or _left_alike(following, generators)):
            return order
        del order
        if not follows:
            raise ValueError(
                f"{type(sampling.inner).__name__} does not go on from its state as it did when that was saved: other "
                "keys follow, whether its generator is as it was then or as it was when the epoch began. What "
                "state_dict() returns must tell, with the generator, all that its order depends on"
            )
        _set(generators, begun_from)  # others drew from it before the save
        order = begun()
    if all(torch.equal(generators[role].get_state(), state) for role, state in begun_from.items()):
        _set(generators, known.generators)  # nothing was drawn: the sampler goes on from there
        for at, (before, item) in enumerate(order.coming):
            order.coming[at] = before and before._replace(generators=known.generators), item
    return order


def _follows(order: Order, following: Following, batched: bool) -> bool:
    """Whether what comes next in this order is what followed."""
    keys = [key for _, item in order.coming for key in (item if batched else [item])]
    return len(order.coming) == following.items and witness_of(keys) == following.witness


def _left_alike(following: Following | None, generators: Mapping[str, torch.Generator]) -> bool:
    """Whether the generators are now as they were after what followed, as far as is known: few keys come by chance."""
    return following is None or following.generators in (None, _digest(generators))


def _digest(generators: Mapping[str, torch.Generator]) -> int:
    digest = 0
    for role in sorted(generators):
        digest = crc32(generators[role].get_state().numpy().tobytes(), digest)
    return digest


def load_ended(
    sampling: Sampling, own: Snapshot, generators: Mapping[str, torch.Generator], taken: Mapping[str, torch.Tensor]
) -> Snapshot | None:
    """Give the sampler the state that it had at an epoch's end, or between two: the next iter() begins the next epoch.

    The generators come to where they were then, ``taken``. Returns the state where it waits for the next iter(): the
    sampler need not tell it before.
    """
    states, untold = own.copy(), None
    nested = states.get("nested") is not None
    if any(state is not None for state in states.values()):
        load = _load_nested if nested else _load_sampler
        load(sampling, own)
        keys = iter(sampling.nested) if nested else _iterator(sampling, own)
        more = next(keys, own) is not own
        del keys  # what it does when it is dropped it does now
        if more:
            load(sampling, own)
            untold = own
    _set(generators, taken)
    return untold


def _load_sampler(sampling: Sampling, own: Snapshot) -> None:
    """Give the sampler its own state back, if there is one. Raises ValueError where it takes none."""
    state = own.copy()["sampler"]
    if state is not None:
        if not is_stateful(sampling.inner):
            raise ValueError(f"the state holds one of the sampler, but {type(sampling.inner).__name__} takes none")
        sampling.inner.load_state_dict(state)


def _load_nested(sampling: Sampling, own: Snapshot) -> None:
    """The same of the sampler inside it."""
    if sampling.nested is None:
        raise ValueError("the state holds one of the sampler inside the batch sampler, but this loader has no such one")
    sampling.nested.load_state_dict(own.copy()["nested"])


def _iterator(sampling: Sampling, own: Snapshot) -> Iterator[Any]:
    """The sampler's iterator, with its own state if it has one. Raises ValueError where it takes none."""
    keys: Iterator[Any] = iter(sampling.inner)
    state = own.copy()["iterator"]
    if state is not None:
        if not is_stateful(keys):
            raise ValueError("the state holds one of the sampler's iterator, but this sampler's iterator takes none")
        keys.load_state_dict(state)  # type: ignore[attr-defined]
    return keys


def _set(generators: Mapping[str, torch.Generator], states: Mapping[str, torch.Tensor]) -> None:
    """The global generator is the user's, and stays."""
    for role, generator in generators.items():
        if role != "default" and role in states:
            generator.set_state(states[role])


def _known_or_stored(
    sampling: Sampling,
    keys: Iterator[Any],
    generators: Mapping[str, torch.Generator],
    begun_from: dict[str, str],
    known: Taken | None = None,
) -> Order:
    sampler = sampling.inner if is_stateful(sampling.inner) else None
    iterator = keys if is_stateful(keys) else None
    way = KEYS if sampler is None and iterator is None else STATE
    parts = (sampler, iterator, sampling.nested)
    return Order(sampling.cut(keys), way, parts=parts, generators=generators, begun_from=begun_from, known=known)


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
