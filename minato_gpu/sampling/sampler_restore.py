"""The order of an epoch, begun or taken up again. Three ways, the first that fits:

- *state*: the sampler or its iterator has ``state_dict`` and ``load_state_dict``. The loader draws ahead of what it
  delivers, so its state now is not that of what is delivered. While saves come often, it is taken before every batch
  that is drawn. Otherwise nothing is copied. A save holds the first state taken since what is to be delivered next (or
  the state now), and the keys drawn between the two.
- *replay*: the order is known to come out the same again: a sequence, or one of torch's own samplers, whose generator
  is kept as it was when the epoch began. The batches delivered before are drawn again and dropped.
- *keys*: nobody knows. What the sampler still has to yield is drawn now and stored.

A sampler that goes on from its state may draw its order once more, from the generator as it was when the epoch began,
or go on drawing from the generator as it was then. Which of the two, nobody says: so where the generator has moved, a
state says what came next, and that must come again. Of few keys both may yield the same, so a state also says how that
leaves the generator, where nobody else has drawn from it since.

A state taken at the end of an epoch is applied by a pass that yields nothing; where it yields, the state was the next
epoch's already, and is given again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

import torch

from minato_gpu.lanes.streams import is_stateful
from minato_gpu.packing import packed_states
from minato_gpu.samples import Value, witness_of
from minato_gpu.sampling.orders import KEYS, STATE, Order, SamplerSnapshot
from minato_gpu.sampling.samplers import Sampling
from minato_gpu.snapshots import Snapshot

ENOUGH = 16
"""So many keys tell what came next; ``witness_of`` looks at no more."""

_States = Mapping[str, torch.Tensor]


class Following(NamedTuple):
    """What came after a state: so many items, whose keys have this witness, and the generators after them this digest
    (None: not known)."""

    items: int
    witness: int
    generators: int | None = None


def fresh_order(sampling: Sampling, batches: Iterator[Value]) -> Order:
    """The order of an epoch that begins. ``batches``: an iterator over the loader's batch sampler, not yet advanced."""
    if sampling.replays:
        return Order(batches, generators=sampling.generators)
    begun_from = packed_states(sampling.generators)  # iter() may draw
    keys = iter(sampling.inner) if sampling.size is not None else batches
    return _known_or_stored(sampling, keys, begun_from)


def order_at_end(sampling: Sampling, own: Snapshot, way: str, taken: _States) -> Order:
    """The order of which all has been drawn; the sampler's state is one of an epoch's end. For the rest see below."""
    known = SamplerSnapshot(own, {**_now(sampling), **taken})
    packed = packed_states(sampling.generators)
    order = Order(iter(()), way, generators=sampling.generators, begun_from=packed, known=known)
    order.untold = load_ended(sampling, own, known.generators)
    order.ended = True
    return order


def order_from_state(sampling: Sampling, own: Snapshot, taken: _States, following: Following | None) -> Order:
    """The order from where the sampler's own state says.

    The generators are as they were when the epoch began; ``taken``: their states when the sampler's was taken. A
    sampler that draws something once more on its way back needs the former, any other goes on from the latter: what is
    ``following`` tells. Raises ValueError where the sampler does not take that state, or something else follows.
    """
    begun_from = _now(sampling)
    known = SamplerSnapshot(own, {**begun_from, **taken})
    packed = packed_states(sampling.generators)
    both = (begun_from, known.generators)
    for states, alike in ((each, alike) for alike in (True, False) for each in both):
        sampling.set_generators(states)
        begun = _known_or_stored(sampling, _taken_up(sampling, own), packed, known)
        follows = _follows(begun, following, batched=sampling.batched, alike=alike)
        if follows and states is begun_from and not begun.moved:  # nothing was drawn: the sampler goes on from there
            sampling.set_generators(known.generators)
            for at, (before, item) in enumerate(begun.coming):
                begun.coming[at] = before and before._replace(generators=known.generators), item
        if follows:
            return begun
        del begun  # what its iterator does when it is dropped it does now
    raise ValueError(
        f"{type(sampling.inner).__name__} does not go on from its state as it did when that was saved: other keys "
        "follow, whether its generator is as it was then or as it was when the epoch began. What state_dict() returns "
        "must tell, with the generator, all that its order depends on"
    )


def _follows(order: Order, following: Following | None, *, batched: bool, alike: bool) -> bool:
    """Draw what comes next, and say whether that is what followed; ``alike``: and leaves the generators as it did.

    Few keys come by chance, too. But where others drew from the generators before the save, they are never left alike.
    """
    order.fill(1)
    if following is None:
        return True
    while len(order.coming) < following.items and order.foresee() is not None:
        pass
    keys = [key for _, item in order.coming for key in (item if batched else [item])]
    return (
        len(order.coming) == following.items
        and witness_of(keys) == following.witness
        and (not alike or following.generators in (None, order.digest))
    )


def load_ended(sampling: Sampling, own: Snapshot, taken: _States) -> Snapshot | None:
    """Give the sampler the state that it had at an epoch's end, or between two: the next iter() begins the next epoch.

    The generators come to where they were then, ``taken``. Returns the state where it waits for the next iter(): the
    sampler need not tell it before.
    """
    states, untold = own.copy(), None
    if any(state is not None for state in states.values()):
        nested = states["nested"] is not None
        keys = _taken_up(sampling, own, nested=nested)
        more = next(keys, own) is not own
        del keys  # what it does when it is dropped it does now
        if more:
            _load(sampling, own, nested=nested)
            untold = own
    sampling.set_generators(taken)
    return untold


def _load(sampling: Sampling, own: Snapshot, *, nested: bool = False) -> Value:
    """Give the sampler its own state back, if there is one; ``nested``: the one inside it. Returns that sampler. Raises
    ValueError where it takes none."""
    sampler, name = (sampling.nested, "nested") if nested else (sampling.inner, "sampler")
    if (state := own.copy()[name]) is not None:
        if not is_stateful(sampler):
            raise ValueError(f"the state holds one of the {name} sampler, but this loader's takes none")
        sampler.load_state_dict(state)
    return sampler


def _taken_up(sampling: Sampling, own: Snapshot, *, nested: bool = False) -> Iterator[Value]:
    """The iterator of a sampler that has its state back, with its own if it has one. Raises ValueError as above."""
    keys: Iterator[Value] = iter(_load(sampling, own, nested=nested))
    if not nested and (state := own.copy()["iterator"]) is not None:
        if not is_stateful(keys):
            raise ValueError("the state holds one of the sampler's iterator, but this sampler's iterator takes none")
        keys.load_state_dict(state)  # type: ignore[attr-defined]
    return keys


def _now(sampling: Sampling) -> _States:
    return {role: generator.get_state() for role, generator in sampling.generators.items()}


def _known_or_stored(
    sampling: Sampling, keys: Iterator[Value], begun_from: dict[str, str], known: SamplerSnapshot | None = None
) -> Order:
    generators = sampling.generators
    sampler = sampling.inner if is_stateful(sampling.inner) else None
    iterator = keys if is_stateful(keys) else None
    way = KEYS if sampler is None and iterator is None else STATE
    parts = (sampler, iterator, sampling.nested)
    return Order(sampling.cut(keys), way, parts=parts, generators=generators, begun_from=begun_from, known=known)


def replayed_order(
    sampling: Sampling, default_state: torch.Tensor | None, begun_from: dict[str, str], *, drawn: bool
) -> Order:
    """The order of an epoch from its beginning once more; the generators are as they were then, but the global one.

    ``default_state``: that one's state then, for a sampler that draws from it; it is left as it is now, unless it is
    still there and the order had not been ``drawn`` yet (who had, may have seeded it alike since). Torch's samplers
    draw when they yield their first key, so that is done here, before anybody else can draw.
    """
    batches = sampling.cut(sampling.inner)
    outside = torch.get_rng_state()
    drawn = drawn or default_state is None or not torch.equal(outside, default_state)
    try:
        if default_state is not None:
            torch.set_rng_state(default_state)
        first = list(islice(batches, 1))
    finally:
        if drawn:
            torch.set_rng_state(outside)
    return Order(batches, begun_from=begun_from, coming=[(None, item) for item in first])
