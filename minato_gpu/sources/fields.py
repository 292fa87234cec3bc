"""Fields of samples in the tier in memory: which are asked of workers, and what goes to make room.

Kept are fields of a pipeline that depend on no draw (pipeline/kept_fields.py): with them a sample needs no read.
The fields of the first samples are asked for, so that their size and what they save are known. From that, from what the
storage gives and from what workers take follow the shares of samples kept as fields and as raw bytes that make an epoch
shortest (caching/split.py). A hash of a sample's number says of which kind it is, so that both kinds fill at the same
pace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minato_gpu.caching.split import Means, Shares, split
from minato_gpu.sources.blocks import space_of
from minato_gpu.sources.memory_tier import NO_ITEM, Copy, MemoryTier
from minato_gpu.sources.source import Key, fields_key

LEARNED = 32  # samples whose fields are known before anything is chosen
_ASKED = 4 * LEARNED  # at most, before that: fields may be such as cannot be sent
_HASH = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_SLACK = 1.05  # times what is chosen of a kind may be kept before some of it goes: choices move a little each epoch


class FieldPolicy:
    """Decides of which of a data set's ``samples`` samples fields are kept, and of which raw bytes.

    ``workers``: how many prepare them. ``rate`` returns what the storage gives, in bytes a second (0.0: it was never
    waited for).
    """

    def __init__(self, memory: MemoryTier, samples: int, workers: int, rate: Callable[[], float]) -> None:
        self.shares: Shares | None = None  # once they are chosen
        self.refused = 0  # samples whose fields cannot be kept
        self.why_refused = ""  # reason for the last of those
        self._means: Means | None = None
        self._memory, self._samples, self._workers, self._rate = memory, samples, workers, rate
        self._asked = 0
        self._known_rate = 0.0
        self._known = 0  # samples whose fields were seen; and their means: bytes, and seconds of a worker
        self._field_bytes = self._saved_s = self._prepare_s = 0.0

    def plan(self, sample: int, keys: Sequence[Key]) -> tuple[Sequence[Key], Sequence[int], bool]:
        """Plans a wanted sample, whose sources have these keys, and counts hits and misses of those that are not looked
        up.

        Returns the keys of what is to be found for it (its fields, if they are kept, else its sources), their items
        (NO_ITEM: not to be kept), and whether its worker is to send its fields.
        """
        memory, parts = self._memory, len(keys)
        items = memory.items(sample, parts)
        if not parts or items[0] == NO_ITEM:
            return keys, items, False
        key = fields_key(sample)
        if memory.holds(key):
            memory.skip(parts - 1, hits=parts - 1)
            return (key,), items[:1], False
        if not self.wants(sample) or not memory.may_keep(sample, round(self._field_bytes)):
            return keys, items, False
        found = [item if memory.holds(key) else NO_ITEM for key, item in zip(keys, items, strict=True)]
        missed = found.count(NO_ITEM)
        memory.skip(missed, misses=missed)
        return keys, found, True

    def wants(self, sample: int) -> bool:
        """Decides whether to keep this sample's fields rather than its raw bytes.

        Before the first choice the answer is True ``_ASKED`` times, and then False.
        """
        if self.shares is None:
            self._asked += 1
            return self._asked <= _ASKED
        fields, raw = self.shares
        return (sample * _HASH & _MASK) / (_MASK + 1) * (fields + raw) < fields

    def observe(self, nbytes: int, saved_s: float, prepare_s: float) -> None:
        """Notes the bytes of a sample's fields, and that they save ``saved_s`` of the ``prepare_s`` seconds that a
        worker takes without them."""
        self._known += 1
        weight = 1 / min(self._known, 1000)
        self._field_bytes += weight * (nbytes - self._field_bytes)
        self._saved_s += weight * (saved_s - self._saved_s)
        self._prepare_s += weight * (prepare_s - self._prepare_s)

    def refuse(self, why: str) -> None:
        """Notes that a sample has a field that cannot be kept."""
        self.refused += 1
        self.why_refused = why

    @property
    def is_due(self) -> bool:
        """True if no shares have been chosen yet, and enough samples are known to do so."""
        return self.shares is None and self._known >= (LEARNED if self._rate() else 2 * LEARNED)

    def choose(self, nbytes: float) -> list[Copy]:
        """Chooses the shares (again), if enough samples are known; ``nbytes``: mean bytes read for a sample.

        Returns the copies that leave memory, for the caller to free.
        """
        self._known_rate = self._rate() or self._known_rate
        if self._known < LEARNED:
            return []
        read_s = nbytes / self._known_rate if self._known_rate else 0.0
        prepare_s, saved_s = self._prepare_s / self._workers, self._saved_s / self._workers
        raw_bytes, field_bytes = space_of(round(nbytes)), space_of(round(self._field_bytes))
        self._means = Means(read_s, prepare_s, max(0.0, min(saved_s, prepare_s)), raw_bytes, field_bytes)
        memory, room = self._memory, self._memory.budget / max(self._samples, 1)
        self.shares = split(self._means, room)
        most = _SLACK * self._samples
        return [
            *memory.shrink(fields=True, budget=most * self.shares.fields * field_bytes),
            *memory.shrink(fields=False, budget=most * self.shares.raw * raw_bytes),
        ]

    def why(self) -> str:
        """Returns the choice in words."""
        refused = f"; of {self.refused} samples no fields: {self.why_refused}" if self.refused else ""
        if self._means is None or self.shares is None:
            return f"raw bytes, until it is known what fields would save{refused}"
        read, prepare, saved, *_ = (1e3 * part for part in self._means)
        kept = f"fields of {self.shares.fields:.0%} and raw bytes of {self.shares.raw:.0%} of the samples"
        times = f"reading takes {read:.2f} ms a sample, preparing {prepare:.2f}, of which fields save {saved:.2f}"
        return f"{kept}: {times}{refused}"
