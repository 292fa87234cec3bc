"""The batches of a sampler, and what its state was before each.

Samplers may apply a state only when they are asked for a key, and till then tell an old one (torchdata's
``StatefulDistributedSampler`` does). So none is asked for its state between iter() and its first key, and what it is
given is applied before anything else is done with it: by drawing what comes next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple
from zlib import crc32

import torch

from minato_gpu.packing import packed_states
from minato_gpu.samples import Value
from minato_gpu.snapshots import Snapshot

STATE, REPLAY, KEYS = "state", "replay", "keys"
MOST_KEYS = 1 << 24
"""So many remaining keys are stored; a sampler with more (an endless one, say) must have a state of its own."""

_FAILED = "the sampler has raised when it was asked for keys ahead of need, and what it would yield next is not known"


class SamplerSnapshot(NamedTuple):
    """States of the sampler, its iterator and the sampler nested in it (of those that have one), and of the generators.

    ``error``: why they could not be had.
    """

    own: Snapshot
    generators: dict[str, torch.Tensor]
    error: str | None = None


Coming = tuple[SamplerSnapshot | None, Value]
"""What a sampler has yielded, and the state before that, where it is known."""


class Order:
    """One epoch's batches (or single keys) as they are drawn, and the way back to any of them.

    ``coming``: what has been drawn and is no ticket yet, the next first, each with the state before it, where known.
    ``generators``: those that it may draw from, by role; ``begun_from``: their states just before it did, packed. None
    where it has not begun: a sampler draws its order when it is first asked, and others may draw until then.
    ``known``: the state before the first item, which the sampler itself may not tell: the one that it was given.
    """

    def __init__(
        self,
        batches: Iterator[Value],
        way: str = REPLAY,
        *,
        parts: tuple[Value, Value, Value] = (None, None, None),
        generators: Mapping[str, torch.Generator] | None = None,
        begun_from: dict[str, str] | None = None,
        known: SamplerSnapshot | None = None,
        coming: Iterable[Coming] = (),
    ) -> None:
        self.way = way
        self.begun_from = begun_from
        self.coming: deque[Coming] = deque(coming)
        self.ended = False  # the sampler has said so; it is not asked again, as it may then begin anew
        self.untold: Snapshot | None = None  # states given for the next iter(): until then the samplers may tell others
        self._batches = batches
        self._parts = dict(zip(("sampler", "iterator", "nested"), parts, strict=True))  # None where not stateful
        self._generators = generators or {}
        self._known = known
        self._begun = False  # it has been asked for something, so that it tells its state
        self._raised: Exception | None = None  # by the sampler, when it was asked for a save: for who draws next
        self._failed = False  # the last that was asked of it raised: whether anything comes after that, nobody knows
        self._before: SamplerSnapshot | None = None  # what was last drawn, or should have been

    def fill(self, items: int, *, keep: bool = False) -> bool:
        """Let so many items be at hand; False where the sampler has ended before. ``keep``: with the state before each
        that is drawn now. What the sampler raises passes through."""
        missing = items - len(self.coming)
        while missing > 0 and not self.ended:
            if self._raised is not None:
                raised, self._raised = self._raised, None
                raise raised
            before = self._known
            if self._begun:
                before = self._take() if keep and self.way == STATE else None
            elif self.begun_from is None:
                self.begun_from = packed_states(self._generators)
            self._before = before
            try:
                self.coming.append((before, next(self._batches)))
                missing -= 1
            except StopIteration:
                self.ended = True
            except Exception:
                self._failed = True
                raise
            self._begun, self._failed = True, False
        return missing <= 0

    def begin(self) -> None:
        """Let the sampler tell its state, unless that is known: the first item is drawn now, if none has been."""
        if not self._begun and self._known is None:
            self.fill(1)

    def foresee(self) -> Coming | None:
        """The item after all that was drawn from the sampler, with the state before it; it comes after those. None at
        the end, also where the sampler raises: then who draws it sees that."""
        if self._failed:
            return None
        try:
            return self.coming[-1] if self.fill(len(self.coming) + 1, keep=True) else None
        except Exception as error:
            self._raised = error
            return None

    @property
    def moved(self) -> bool:
        """Whether the generators have moved since just before the order was drawn."""
        return self.begun_from is not None and packed_states(self._generators) != self.begun_from

    @property
    def digest(self) -> int:
        """Of the generators' states now."""
        states = [self._generators[role].get_state() for role in sorted(self._generators)]
        return crc32(b"".join(state.numpy().tobytes() for state in states))

    def state(self) -> SamplerSnapshot:
        """The state after all that was drawn from the sampler; see ``begin``."""
        if self._failed:  # whoever drew ahead has its error, which the consumer may not have come to
            return self._before or SamplerSnapshot(Snapshot(None), {}, _FAILED)
        return self._take() if self._begun or self._known is None else self._known

    def _take(self) -> SamplerSnapshot:
        generators = {role: generator.get_state() for role, generator in self._generators.items()}
        try:
            own = {name: None if part is None else part.state_dict() for name, part in self._parts.items()}
            return SamplerSnapshot(Snapshot(own), generators)
        except Exception as error:  # it matters to nobody but who saves
            return SamplerSnapshot(Snapshot(None), {}, f"the sampler's state_dict(): {type(error).__name__}: {error}")

    def generator_states(self) -> dict[str, str]:
        """What the generators must be set to for this way back, packed: keys that are stored are not drawn again."""
        if self.way == KEYS or self.begun_from is None:
            return packed_states(self._generators)
        return self.begun_from

    def draw_rest(self) -> None:
        """Let all that is still to come be at hand. Raises ValueError for too many, and what the sampler raises; who
        draws it sees that too, unless a later save has asked again, and come to the end."""
        had, failed = len(self.coming), self._failed
        raised, self._raised = self._raised, None
        try:
            self.fill(MOST_KEYS)
        except Exception as error:
            raised = error
            raise
        finally:
            self._raised = raised
        if failed and len(self.coming) == had:  # a generator that has raised tells of its end, whatever was left
            self._failed, self.ended = True, False
            raise ValueError(f"this epoch cannot be saved: {_FAILED}")
        if len(self.coming) >= MOST_KEYS:
            raise ValueError(
                f"the sampler still yields {MOST_KEYS} items or more, too many to store in a state; give it "
                "state_dict() and load_state_dict(), which the loader then uses"
            )
