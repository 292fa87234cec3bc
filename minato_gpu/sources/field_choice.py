"""Which samples the tier in memory keeps as fields, and which as raw bytes: measured first, and then calculated.

Of the first samples the fields are asked for, so that their size and what they save are known. From that, from what the
storage gives and from what workers take follow the shares that make an epoch shortest (caching/split.py). Which samples
are of which kind says a hash of their number, so that both kinds fill at the same pace. Decisions only.
"""

from __future__ import annotations

from minato_gpu.caching.split import Means, Shares, split
from minato_gpu.sources.blocks import space_of

LEARNED = 32  # samples whose fields are known before anything is chosen
_ASKED = 4 * LEARNED  # at most, before that: fields may be such as cannot be sent
_HASH = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class FieldChoice:
    """For a tier of ``budget`` bytes, ``samples`` samples and so many ``workers``."""

    def __init__(self, budget: int, samples: int, workers: int) -> None:
        self.shares: Shares | None = None
        self.means: Means | None = None
        self.samples = samples
        self.field_bytes = 0.0  # of a sample, on average
        self._budget, self._workers = budget, workers
        self.known = 0  # samples whose fields were seen
        self._asked = 0
        self._saved_s = self._prepare_s = 0.0  # of a worker, means as well

    def wants(self, sample: int) -> bool:
        """Whether to keep this sample's fields, rather than its raw bytes."""
        if self.shares is None:
            self._asked += 1
            return self._asked <= _ASKED
        fields, raw = self.shares
        return (sample * _HASH & _MASK) / (_MASK + 1) * (fields + raw) < fields

    def observe(self, nbytes: int, saved_s: float, prepare_s: float) -> None:
        """The fields of a sample have so many bytes; they save so much of a worker's ``prepare_s`` seconds."""
        self.known += 1
        weight = 1 / min(self.known, 1000)
        self.field_bytes += weight * (nbytes - self.field_bytes)
        self._saved_s += weight * (saved_s - self._saved_s)
        self._prepare_s += weight * (prepare_s - self._prepare_s)

    @property
    def learned(self) -> tuple[float, ...]:
        """For the reader process after this one: what it is given as this, it knows."""
        return self.known, self.field_bytes, self._saved_s, self._prepare_s

    @learned.setter
    def learned(self, learned: tuple[float, ...]) -> None:
        known, self.field_bytes, self._saved_s, self._prepare_s = learned
        self.known = int(known)

    def choose(self, raw_bytes: float, read_s: float, *, keeps_raw: bool) -> None:
        """Choose anew, if enough is known: of a sample's raw bytes, and the seconds for which it holds the storage."""
        if self.known < LEARNED:
            return
        prepare_s, saved_s = self._prepare_s / self._workers, self._saved_s / self._workers
        field_bytes = space_of(round(self.field_bytes))
        self.means = Means(read_s, prepare_s, max(0.0, min(saved_s, prepare_s)), raw_bytes, field_bytes)
        self.shares = split(self.means, self._budget / max(self.samples, 1), keeps_raw=keeps_raw)

    def why(self) -> str:
        """In words."""
        if self.means is None or self.shares is None:
            return "raw bytes, until it is known what fields would save"
        read, prepare, saved, *_ = (1e3 * part for part in self.means)
        kept = f"fields of {self.shares.fields:.0%} and raw bytes of {self.shares.raw:.0%} of the samples"
        return (
            f"{kept}: reading takes {read:.2f} ms a sample, preparing {prepare:.2f}, of which fields save {saved:.2f}"
        )
