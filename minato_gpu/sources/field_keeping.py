"""Fields of samples in the tier in memory: which are asked of workers, and what goes to make room for them.

Between the service, which knows what is wanted, the tier's books (memory_tier.py) and the choice (field_choice.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minato_gpu.sources.blocks import space_of
from minato_gpu.sources.field_choice import LEARNED, FieldChoice
from minato_gpu.sources.memory_tier import NO_ITEM, Copy, MemoryTier
from minato_gpu.sources.source import Key, fields_key

_SLACK = 1.05  # times what is chosen of a kind may be kept before some of it goes: choices move a little each epoch


class FieldKeeping:
    """``rate``: what the storage gives, in bytes a second (0.0: more than is asked for). ``memory.learned``: what is
    known from the process before this one, and for the next."""

    def __init__(self, memory: MemoryTier, choice: FieldChoice, rate: Callable[[], float]) -> None:
        self.choice = choice
        self._memory, self._rate = memory, rate
        self._known_rate = 0.0
        if memory.learned:
            self._known_rate, *learned = memory.learned
            choice.learned = tuple(learned)

    def plan(self, sample: int, keys: Sequence[Key]) -> tuple[Sequence[Key], Sequence[int], bool]:
        """A sample is wanted: what is to be found for it, of which items, and whether to ask for its fields."""
        memory, parts = self._memory, len(keys)
        items = memory.items(sample, parts)
        if not parts or items[0] == NO_ITEM:
            return keys, items, False
        key = fields_key(sample)
        if memory.holds(key):
            memory.skip(parts - 1, hits=True)
            return (key,), items[:1], False
        if not self.choice.wants(sample) or not memory.may_keep(sample, round(self.choice.field_bytes)):
            return keys, items, False
        found = [item if memory.holds(key) else NO_ITEM for key, item in zip(keys, items, strict=True)]
        memory.skip(found.count(NO_ITEM), hits=False)
        return keys, found, True

    @property
    def is_due(self) -> bool:
        """Whether enough is known, and nothing has been chosen."""
        known = self.choice.known
        return self.choice.shares is None and known >= (LEARNED if self._rate() else 2 * LEARNED)

    def note(self) -> None:
        """Let the tier know what has been learned."""
        self._known_rate = self._rate() or self._known_rate
        self._memory.learned = self._known_rate, *self.choice.learned

    def choose(self, nbytes: float) -> list[Copy]:
        """Choose anew; ``nbytes``: what is read for a sample. Returns what is not to be kept any more."""
        self.note()
        rate = self._known_rate
        read_s = nbytes / rate if rate else 0.0
        self.choice.choose(space_of(round(nbytes)), read_s, keeps_raw=not self._memory.off_for_files)
        shares, means = self.choice.shares, self.choice.means
        if shares is None or means is None:
            return []
        samples = self.choice.samples
        return [
            *self._memory.shrink(fields=True, budget=_SLACK * shares.fields * samples * means.field_bytes),
            *self._memory.shrink(fields=False, budget=_SLACK * shares.raw * samples * means.raw_bytes),
        ]
