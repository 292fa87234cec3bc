"""One epoch's order: the sampler's batches as they are drawn, and three ways back into the middle of them.

- *state*: the sampler or its iterator has ``state_dict`` and ``load_state_dict``. A save asks for that state, and
  stores the keys that are drawn and not delivered. It also draws the next batch, whose keys must follow after a resume.
- *replay*: a sequence, or one of torch's own samplers (but see ``Sampling.replays``): it yields the same again from
  the generators as they were when the epoch began. A resume draws everything again.
- *keys*: any other sampler. A save draws all that it still yields, and stores the keys.

Samplers may apply a state only when they are asked for a key, and report an old one until then (torchdata's
``StatefulDistributedSampler`` does). So none is asked for its state between ``iter()`` and its first key.

Decision: a sampler is asked for its state by a save, not every ``snapshot_every_n_steps`` batches. Whoever does not
save pays nothing, however large the state is, and no state of the past has to be kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

import torch

from minato_gpu.lanes.snapshots import Snapshot
from minato_gpu.lanes.streams import is_stateful
from minato_gpu.samples import Value, witness_of
from minato_gpu.sampling.packing import packed_states
from minato_gpu.sampling.samplers import Sampling

STATE, REPLAY, KEYS = "state", "replay", "keys"
MOST_KEYS = 1 << 24
"""The least number of remaining items (batches or keys) that no state stores: a sampler with so many (an endless one,
say) must have a state of its own."""


class SamplerSnapshot(NamedTuple):
    """The states of a sampler and of the generators at one moment, and what the sampler yielded after it."""

    own: Snapshot  # states of the sampler, its iterator, and a sampler nested in it, of those that have one
    generators: Mapping[str, torch.Tensor]  # states of generators by role
    following: tuple[Value, ...] = ()  # the next batch (or key); empty if the sampler has ended or raised


class Order:
    """One epoch's batches (or single keys) as they are drawn."""

    def __init__(
        self,
        batches: Iterator[Value],
        way: str = REPLAY,
        *,
        sampling: Sampling | None = None,
        iterator: Value = None,
        begun_from: dict[str, str] | None = None,
        coming: Iterable[Value] = (),
    ) -> None:
        """``batches`` yields what is drawn; ``way`` is one of the three; ``iterator`` runs over the sampler's keys and
        may have a state. ``sampling`` has the samplers and generators whose states are saved; None: no states are. For
        the others see the fields."""
        self.way = way
        self.coming = deque(coming)  # drawn from the sampler, and not yet by the epoch
        # of a replayed order: the generators just before it was drawn, packed; None until it is
        self.begun_from = begun_from
        # the sampler has raised StopIteration; it is not asked again, as it may then begin anew
        self.ended = False
        # a state given to the samplers that they report only after the next iter()
        self.pending: Snapshot | None = None
        self._batches = batches
        self._generators = {} if sampling is None else sampling.generators
        parts = {} if sampling is None else {"sampler": sampling.inner, "iterator": iterator, "nested": sampling.nested}
        self._parts = {name: part for name, part in parts.items() if is_stateful(part)}
        self._begun = False  # the sampler has been asked for a key
        self._ahead: SamplerSnapshot | None = None  # the last save's: what follows it comes after ``coming``
        # raised by the sampler when a save drew ahead: the consumer gets it when it comes there
        self._raised: Exception | None = None
        # the sampler raised when it was last asked: whether anything comes after that is unknown
        self._failed = False

    def fill(self, items: int) -> bool:
        """Draws until ``coming`` holds ``items``. Returns False if the sampler ends before. Raises what the sampler
        raises."""
        while len(self.coming) < items and not self.ended:
            if self._ahead is not None:
                (item,), self._ahead = self._ahead.following, None
            elif (found := self._draw()) is None:
                return False
            else:
                (item,) = found
            self.coming.append(item)
        return len(self.coming) >= items

    def _draw(self) -> tuple[Value] | None:
        """Returns what the sampler yields next, or None at its end."""
        if self._raised is not None:
            raised, self._raised = self._raised, None
            raise raised
        if self.way == REPLAY and self.begun_from is None:
            self.begun_from = packed_states(self._generators)
        self._begun, self._failed = True, False
        try:
            return (next(self._batches),)
        except StopIteration:
            self.ended = True
            return None
        except Exception:
            self._failed = True
            raise

    # --- saving -------------------------------------------------------------------------------------------------

    def snapshot(self) -> SamplerSnapshot:
        """Returns the sampler's state after all that is in ``coming``, and draws what follows, which stays out of
        ``coming``.

        Raises ValueError if the sampler cannot tell its state. What the sampler itself raises is raised here for its
        first key only; later, the consumer gets it when it comes there.
        """
        if not self._begun and not self.ended:
            self._draw_for_save(1)
        if self._ahead is None and not (self.ended or self._failed):
            taken = self._taken()
            try:
                following = self._draw()
            except Exception as error:  # the consumer's, when it comes there
                self._raised = error
                return taken
            if following is not None:
                self._ahead = taken._replace(following=following)
        return self._ahead or self._taken()

    def _taken(self) -> SamplerSnapshot:
        generators = {role: generator.get_state() for role, generator in self._generators.items()}
        if self.pending is not None:
            return SamplerSnapshot(self.pending, generators)
        try:
            own = Snapshot({name: part.state_dict() for name, part in self._parts.items()})
        except Exception as error:
            said = f"the sampler's state_dict(): {type(error).__name__}: {error}"
            raise ValueError(f"this epoch cannot be saved: {said}") from error
        return SamplerSnapshot(own, generators)

    def draw_rest(self) -> None:
        """Draws all that is still to come, for a save. Raises ValueError for ``MOST_KEYS`` items (batches or keys) or
        more, and what the sampler raises."""
        self._draw_for_save(MOST_KEYS)
        if len(self.coming) >= MOST_KEYS:
            raise ValueError(
                f"the sampler still yields {MOST_KEYS} items or more, too many to store in a state; give it "
                "state_dict() and load_state_dict(), which the loader then uses"
            )

    def _draw_for_save(self, items: int) -> None:
        """Draws ahead for a save. An error of the sampler is raised here, and again to whoever draws next."""
        if self._failed:
            raise ValueError(
                "this epoch cannot be saved: the sampler has raised when it was asked for keys, and what it would "
                "yield next is not known. Save once it has yielded another batch, or give it state_dict() and "
                "load_state_dict()"
            )
        try:
            self.fill(items)
        except Exception as error:
            self._raised = error
            raise

    # --- resuming -----------------------------------------------------------------------------------------------

    def follow(self, snapshot: SamplerSnapshot, sampling: Sampling, witness: int) -> None:
        """Draws what follows a state that the sampler was given. Raises ValueError if nothing does, or other keys than
        when the state was saved."""
        following = self._draw()
        if following is None or witness_of(sampling.keys_of(*following)) != witness:
            raise ValueError(
                f"{type(sampling.inner).__name__} does not go on from its state as it did when that was saved: other "
                "keys follow. What its state_dict() returns must hold all that its order depends on, the state of a "
                "random generator among it, as torchdata's samplers do"
            )
        self._ahead = snapshot._replace(following=following)


def fresh_order(sampling: Sampling, batches: Iterator[Value]) -> Order:
    """Returns the order of an epoch that begins; ``batches`` iterates the loader's batch sampler and has not been
    advanced."""
    if sampling.replays or sampling.iterable:
        return Order(batches, sampling=sampling)
    return _order_of(sampling, iter(sampling.inner) if sampling.size is not None else batches)


def _order_of(sampling: Sampling, keys: Iterator[Value]) -> Order:
    way = STATE if is_stateful(sampling.inner) or is_stateful(keys) else KEYS
    return Order(sampling.cut(keys), way, sampling=sampling, iterator=keys)


def order_from_state(sampling: Sampling, own: Snapshot, witness: int | None) -> Order:
    """Returns the order that goes on from a sampler's own state. The generators have been set to where they were then.

    ``witness`` is of the keys that followed; None: unknown. Raises ValueError if the sampler takes no such state, or
    yields other keys than it did.
    """
    generators = {role: generator.get_state() for role, generator in sampling.generators.items()}
    order = _order_of(sampling, _loaded(sampling, own))
    if witness is not None:
        order.follow(SamplerSnapshot(own, generators), sampling, witness)
    return order


def order_at_end(sampling: Sampling, own: Snapshot, way: str, generators: Mapping[str, torch.Tensor]) -> Order:
    """Returns an order of which all has been drawn, after giving sampler and generators their states at the epoch's end
    (``load_ended``)."""
    order = Order(iter(()), way, sampling=sampling)
    order.pending = load_ended(sampling, own, generators)
    order.ended = True
    return order


def replayed_order(sampling: Sampling, default_state: torch.Tensor | None, begun_from: dict[str, str]) -> Order:
    """Returns the order of an epoch once more from its beginning, with the generators as they were then.

    ``default_state`` is the global generator's state then, for a sampler that draws from it. That generator is the
    user's and is left as it is now. torch's samplers draw when they yield their first key, so that is done here, before
    anybody else can draw.
    """
    batches = sampling.cut(sampling.inner)
    outside = torch.get_rng_state()
    try:
        if default_state is not None:
            torch.set_rng_state(default_state)
        first = list(islice(batches, 1))
    finally:
        torch.set_rng_state(outside)
    return Order(batches, sampling=sampling, begun_from=begun_from, coming=first)


def states_between(sampling: Sampling, order: Order | None) -> dict[str, Value]:
    """Returns the states of the sampler ("sampler") and of one in it ("nested"), None for one that has no state.

    ``order``: the last epoch's, of which all has been drawn; None: no epoch has begun.
    """
    parts = {"sampler": sampling.inner, "nested": sampling.nested}
    if order is not None and order.pending is not None:
        given = order.pending.copy()
        return {name: given.get(name) for name in parts}
    return {name: Snapshot(part.state_dict()).copy() if is_stateful(part) else None for name, part in parts.items()}


def load_ended(sampling: Sampling, own: Snapshot, generators: Mapping[str, torch.Tensor]) -> Snapshot | None:
    """Gives sampler and generators the states that they had at an epoch's end, or between two: the next ``iter()``
    begins the next epoch. Raises ValueError if the sampler takes none.

    Some samplers apply a state only in a pass, so one key is asked for. If there is none, the epoch had ended. If one
    comes, the state was the next epoch's: it is given once more, and returned, as the sampler may not report it before
    the next ``iter()``. Else returns None.
    """
    states, pending = own.copy(), None
    if any(state is not None for state in states.values()):
        nested = states.get("nested") is not None
        keys = _loaded(sampling, own, nested=nested)
        more = next(keys, own) is not own
        del keys  # what it does when it is dropped it does now
        if more:
            _load(sampling, own, nested=nested)
            pending = own
    sampling.set_generators(generators)
    return pending


def _load(sampling: Sampling, own: Snapshot, *, nested: bool = False) -> Value:
    """Gives the sampler (or the one ``nested`` in it) its own state back, if there is one, and returns that sampler.

    Raises ValueError if it takes none.
    """
    sampler, name = (sampling.nested, "nested") if nested else (sampling.inner, "sampler")
    if (state := own.copy().get(name)) is not None:
        if not is_stateful(sampler):
            raise ValueError(f"the state holds one of the {name} sampler, but this loader's takes none")
        sampler.load_state_dict(state)
    return sampler


def _loaded(sampling: Sampling, own: Snapshot, *, nested: bool = False) -> Iterator[Value]:
    """Returns the iterator of a sampler that has its state back, with the iterator's own state, if it has one.

    Raises ValueError if either takes none.
    """
    keys: Iterator[Value] = iter(_load(sampling, own, nested=nested))
    if not nested and (state := own.copy().get("iterator")) is not None:
        if not is_stateful(keys):
            raise ValueError("the state holds one of the sampler's iterator, but this sampler's iterator takes none")
        keys.load_state_dict(state)  # type: ignore[attr-defined]
    return keys
