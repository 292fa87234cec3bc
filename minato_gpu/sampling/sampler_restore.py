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
from typing import Any, NamedTuple

import torch

from minato_gpu.lanes.streams import is_stateful
from minato_gpu.packing import packed_state, packed_states
from minato_gpu.samples import witness_of
from minato_gpu.sampling.orders import KEYS, STATE, Order, SamplerSnapshot
from minato_gpu.sampling.samplers import Sampling
from minato_gpu.snapshots import Snapshot

ENOUGH = 16
"""So many keys tell what came next; ``witness_of`` looks at no more."""


class Following(NamedTuple):
    """What came after a state: so many items, whose keys have this witness, and the generators after them this digest
    (None: not known)."""

    items: int
    witness: int
    generators: int | None = None


def fresh_order(sampling: Sampling, batches: Iterator[Any], generators: Mapping[str, torch.Generator]) -> Order:
    """The order of an epoch that begins. ``batches``: an iterator over the loader's batch sampler, not yet advanced."""
    if sampling.replays:
        return Order(batches, generators=generators)
    begun_from = packed_states(generators)  # iter() may draw
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
    packed = {role: packed_state(state) for role, state in begun_from.items()}
    known = SamplerSnapshot(own, {**begun_from, **taken})
    if ended:
        order = Order(iter(()), STATE, generators=generators, begun_from=packed, known=known)
        order.untold = load_ended(sampling, own, generators, known.generators)
        order.ended = True
        return order
    both = (begun_from, known.generators)
    for states, alike in ((each, alike) for alike in (True, False) for each in both):
        _set(generators, states)
        _load_sampler(sampling, own)
        begun = _known_or_stored(sampling, _iterator(sampling, own), generators, packed, known)
        follows = _follows(begun, following, batched=batched, alike=alike)
        if follows and states is begun_from and not begun.moved:  # nothing was drawn: the sampler goes on from there
            _set(generators, known.generators)
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
    order.draw_ahead()
    if following is None:
        return True
    for _ in range(1, following.items):
        order.foresee()
    keys = [key for _, item in order.coming for key in (item if batched else [item])]
    return (
        len(order.coming) == following.items
        and witness_of(keys) == following.witness
        and (not alike or following.generators in (None, order.digest))
    )


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
    known: SamplerSnapshot | None = None,
) -> Order:
    sampler = sampling.inner if is_stateful(sampling.inner) else None
    iterator = keys if is_stateful(keys) else None
    way = KEYS if sampler is None and iterator is None else STATE
    parts = (sampler, iterator, sampling.nested)
    return Order(sampling.cut(keys), way, parts=parts, generators=generators, begun_from=begun_from, known=known)


def replayed_order(sampling: Sampling, default_state: torch.Tensor | None, begun_from: dict[str, str]) -> Order:
    """The order of an epoch from its beginning once more; the generators are as they were then, but the global one.

    ``default_state``: that one's state then, for a sampler that draws from it; it is left as it is now, unless it is
    still there: then the order had not been drawn. Torch's samplers draw when they yield their first key, so that is
    done here, before anybody else can draw.
    """
    batches = sampling.cut(sampling.inner)
    outside = torch.get_rng_state()
    drawn = default_state is None or not torch.equal(outside, default_state)
    try:
        if default_state is not None:
            torch.set_rng_state(default_state)
        first = list(islice(batches, 1))
    finally:
        if drawn:
            torch.set_rng_state(outside)
    order = Order(batches, begun_from=begun_from)
    for item in first:
        order.put_back(item)
    return order
