"""One epoch's order: the sampler's batches as they are drawn, and three ways back into the middle of them.

- *state*: the sampler or its iterator has ``state_dict`` and ``load_state_dict``. Its state is taken every
  ``snapshot_every_n_steps`` batches, and while nobody saves, or where it is large, every sixteenth at most, together
  with the loader's and the sampler's generators. A resume loads it and draws again what came since, whose keys must be
  those that came.
- *replay*: a sequence, or one of torch's own samplers: it yields the same again from the generators as they were when
  the epoch began. A resume draws everything again.
- *keys*: any other sampler. A save draws all that it still yields, and stores the keys.

Samplers may apply a state only when they are asked for a key, and report an old one until then (torchdata's
``StatefulDistributedSampler`` does). So none is asked for its state between ``iter()`` and its first key.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

import torch

from minato_gpu.lanes.snapshots import Snapshot
from minato_gpu.lanes.streams import EVERY, LARGE, is_stateful
from minato_gpu.samples import Key, Value, witness_of
from minato_gpu.sampling.packing import packed_states
from minato_gpu.sampling.samplers import Sampling

STATE, REPLAY, KEYS = "state", "replay", "keys"
MOST_KEYS = 1 << 24
"""Remaining keys that a state may store; a sampler with more (an endless one, say) must have a state of its own."""
ENOUGH = 16
"""Keys that are compared after a resume: ``witness_of`` looks at no more."""


class SamplerSnapshot(NamedTuple):
    """The states of a sampler and of the generators at one moment."""

    own: Snapshot  # states of the sampler, its iterator, and a sampler nested in it, of those that have one
    generators: Mapping[str, torch.Tensor]  # states of generators by role
    error: str | None = None  # why the states could not be taken


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
        known: SamplerSnapshot | None = None,
        coming: Iterable[tuple[SamplerSnapshot | None, Value]] = (),
    ) -> None:
        """``iterator`` runs over the sampler's keys and may have a state; ``known`` is the state before the first
        batch, if the sampler was given one."""
        self.way = way
        # drawn from the sampler, and not yet by the epoch; with the snapshot taken before each, if any
        self.coming = deque(coming)
        # of a replayed order: the generators just before it was drawn, packed; None until it is
        self.begun_from = begun_from
        # the sampler has raised StopIteration; it is not asked again, as it may then begin anew
        self.ended = False
        # a state given to the samplers that they report only after the next iter()
        self.pending: Snapshot | None = None
        self._batches = batches
        self._generators = {} if sampling is None else sampling.generators
        self._every = 1 if sampling is None else sampling.snapshot_every
        parts = {} if sampling is None else {"sampler": sampling.inner, "iterator": iterator, "nested": sampling.nested}
        self._parts = {name: part for name, part in parts.items() if is_stateful(part)}
        self._known = known
        self._replays = False  # there is nothing more to be noted before a batch
        self._drawn = 0
        self._latest: int | None = None  # when a snapshot was last taken, in batches; None: the next is due
        self._saves_until = 0  # in batches; up to there saves are expected
        # raised by the sampler when a save drew ahead: the consumer gets it when it comes there
        self._raised: Exception | None = None
        # the sampler raised when it was last asked: whether anything comes after that is unknown
        self._failed = False

    def fill(self, items: int) -> bool:
        """Draws until ``items`` are ready. Returns False if the sampler ends before. Raises what the sampler raises."""
        missing = items - len(self.coming)
        while missing > 0 and not self.ended:
            if self._raised is not None:
                raised, self._raised = self._raised, None
                raise raised
            before = None if self._replays else self._before_next()
            try:
                self.coming.append((before, next(self._batches)))
                missing -= 1
            except StopIteration:
                self.ended = True
            except Exception:
                self._failed = True
                raise
            self._failed = False
            if not self._replays:
                self._drawn += 1
        return missing <= 0

    def expect_saves(self) -> None:
        """Takes states as often as asked for, until some batches after this save."""
        self._saves_until = self._drawn + EVERY

    def fill_to_snapshot(self) -> None:
        """Draws up to a batch before which a snapshot is taken, if any comes: nothing that is ready has one.

        Raises what ``fill_for_save`` raises.
        """
        self._latest = None
        self.fill_for_save(len(self.coming) + (1 if self._drawn else 2))  # before the first there is no state

    def fill_for_save(self, items: int) -> None:
        """Draws ahead for a save. An error of the sampler is raised here, and again to whoever draws next."""
        failed, had = self._failed, len(self.coming)
        raised, self._raised = self._raised, None
        try:
            self.fill(items)
        except Exception as error:
            raised = error
            raise
        finally:
            self._raised = raised
        if failed and self.ended and len(self.coming) == had:  # a generator that has raised ends, whatever was left
            self._failed, self.ended = True, False
            raise ValueError(
                "this epoch cannot be saved: the sampler has raised when it was asked for keys ahead of need, and what "
                "it would yield next is not known"
            )

    def _before_next(self) -> SamplerSnapshot | None:
        """Returns the sampler's state before the next batch, if one is to be taken now."""
        if self.way == REPLAY:
            if self.begun_from is None:
                self.begun_from = packed_states(self._generators)
            self._replays = True
            return None
        if self._drawn == 0:
            return self._known
        every = self._every if self._drawn < self._saves_until else max(self._every, EVERY)
        if self.way != STATE or (self._latest is not None and self._drawn - self._latest < every):
            return None
        self._latest = self._drawn
        taken = self.snapshot()
        if taken.own.nbytes > LARGE:  # copying it takes as long as a batch
            self._every = max(self._every, EVERY)
        return taken

    def snapshot(self) -> SamplerSnapshot:
        """Returns the sampler's state after all that was drawn from it."""
        generators = {role: generator.get_state() for role, generator in self._generators.items()}
        try:
            return SamplerSnapshot(
                Snapshot({name: part.state_dict() for name, part in self._parts.items()}), generators
            )
        except Exception as error:  # of interest only to who saves
            return SamplerSnapshot(Snapshot(None), {}, f"the sampler's state_dict(): {type(error).__name__}: {error}")

    def at_end(self) -> SamplerSnapshot:
        """Returns the sampler's state after the last batch."""
        taken = self.snapshot()
        return taken if self.pending is None else taken._replace(own=self.pending, error=None)

    def draw_rest(self) -> None:
        """Draws all that is still to come, for a save. Raises ValueError for too many keys."""
        self.fill_for_save(MOST_KEYS)
        if len(self.coming) >= MOST_KEYS:
            raise ValueError(
                f"the sampler still yields {MOST_KEYS} items or more, too many to store in a state; give it "
                "state_dict() and load_state_dict(), which the loader then uses"
            )


def fresh_order(sampling: Sampling, batches: Iterator[Value]) -> Order:
    """Returns the order of an epoch that begins; ``batches`` iterates the loader's batch sampler and has not been
    advanced."""
    if sampling.replays or sampling.iterable:
        return Order(batches, sampling=sampling)
    return _order_of(sampling, iter(sampling.inner) if sampling.size is not None else batches)


def _order_of(sampling: Sampling, keys: Iterator[Value], known: SamplerSnapshot | None = None) -> Order:
    way = STATE if is_stateful(sampling.inner) or is_stateful(keys) else KEYS
    return Order(sampling.cut(keys), way, sampling=sampling, iterator=keys, known=known)


# --- resuming -----------------------------------------------------------------------------------------------


class NextKeys(NamedTuple):
    """A check of the keys that came after a snapshot."""

    items: int  # batches (or keys) that are compared
    witness: int  # hash of these keys


def order_from_state(sampling: Sampling, own: Snapshot, following: NextKeys) -> Order:
    """Returns the order that goes on from a sampler's own state, with the generators as they were then.

    Raises ValueError if the sampler takes no such state, or yields other keys than it did.
    """
    known = SamplerSnapshot(own, {role: generator.get_state() for role, generator in sampling.generators.items()})
    order = _order_of(sampling, _loaded(sampling, own), known)
    order.fill(following.items)
    keys: list[Key] = [key for _, item in order.coming for key in sampling.keys_of(item)]
    if len(order.coming) < following.items or witness_of(keys) != following.witness:
        raise ValueError(
            f"{type(sampling.inner).__name__} does not go on from its state as it did when that was saved: other keys "
            "follow. What its state_dict() returns must hold all that its order depends on, the state of a random "
            "generator among it, as torchdata's samplers do"
        )
    return order


def order_at_end(sampling: Sampling, own: Snapshot, way: str, generators: Mapping[str, torch.Tensor]) -> Order:
    """Returns an order of which all has been drawn; the sampler's state is that of an epoch's end."""
    order = Order(iter(()), way, sampling=sampling)
    order.pending = load_ended(sampling, own, generators)
    order.ended = True
    return order


def replayed_order(
    sampling: Sampling, default_state: torch.Tensor | None, begun_from: dict[str, str], *, drawn: bool
) -> Order:
    """Returns the order of an epoch once more from its beginning, with the generators as they were then.

    ``default_state`` is the global generator's state then, for a sampler that draws from it. That generator is the
    user's and is left as it is now, unless it is still there and the order had not been ``drawn`` yet (otherwise others
    may have seeded it alike since). torch's samplers draw when they yield their first key, so that is done here, before
    anybody else can draw.
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


def states_between(sampling: Sampling, order: Order | None) -> dict[str, Value]:
    """Returns the states of the sampler, and of one nested in it, after an order of which all has been drawn."""
    parts = {"sampler": sampling.inner, "nested": sampling.nested}
    if order is not None and order.pending is not None:
        given = order.pending.copy()
        return {name: given.get(name) for name in parts}
    return {name: Snapshot(part.state_dict()).copy() if is_stateful(part) else None for name, part in parts.items()}


def load_ended(sampling: Sampling, own: Snapshot, generators: Mapping[str, torch.Tensor]) -> Snapshot | None:
    """Gives the sampler the state that it had at an epoch's end, or between two: the next ``iter()`` begins the next
    epoch.

    Such a state is applied by a pass that yields nothing; where it yields, it was the next epoch's already, and is
    given again. Returns the state where it waits for the next iter(): the sampler need not report it before.
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
