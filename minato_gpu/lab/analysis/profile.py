"""The measurements of one rank of a training script, and another setting of it: plain data.

The model is DS-Analyzer's (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021): rates of
fetching (F), preparing (P) and training (G), each measured while the other two cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal

LoaderKind = Literal["torch", "minato_gpu"]


@dataclass(frozen=True)
class Storage:
    """How samples' bytes arrive from storage."""

    bytes_per_s: float  # the most that the storage gives, all requests together
    latency_s: float  # of a request, until its first byte
    requests: float  # of a sample, on average
    nbytes: float  # of a sample, on average
    concurrency: float  # requests under way at once while it was measured
    cached_share: float | None = None  # of the set's bytes, in the page cache before the cold phase; None: not seen

    def seconds_per_sample(self) -> float:
        """The least time between two samples: max(bytes / rate, requests x latency / concurrency)."""
        return max(self.nbytes / self.bytes_per_s, self.requests * self.latency_s / max(self.concurrency, 1.0))


@dataclass(frozen=True)
class Phase:
    """One phase of the analysis."""

    batch_s: tuple[float, ...]  # seconds of each batch, its wait and its step
    wait_s: float  # of a batch, on average

    @property
    def each_s(self) -> float:
        """Seconds of a batch, on average; 0 where there was none."""
        return mean(self.batch_s)


@dataclass(frozen=True)
class Profile:
    """One rank's epoch.

    ``samples``: of an epoch. ``prefetch``: batches for each worker. ``cores``: that this rank may use, a part of one
    where ranks outnumber them. ``prepare_s``: seconds of one worker for each sample that was seen while its bytes were
    in memory; ``prepare_cpu_share``: of these, what was computed and not waited. ``collate_s``:
    of a batch. ``step_s``: of each training step with a batch that was there already, its transfer left out;
    ``transfer_s``: of a batch to the device. ``loader_s``: what the loader itself costs the consumer's thread, of a
    batch. ``startup_s``: until the first batch. ``scaling``: (workers, samples a second), rising, as it was tried.
    ``stages_s``: mean seconds of a sample in each stage. ``phases``: by name: ``compute`` (T1), ``warm`` (T2), ``cold``
    (T3). ``storage``: None where no read was seen. ``step_cpu_share``: of a step, what it computes on cores that
    workers share (above 1 where several threads do). ``persistent``: workers outlive an epoch; ``overlap``: the next
    epoch is prepared while this one ends. ``shards``: an epoch reads one sample of the set in so many, as where ranks
    share it out. ``slowest``: (seconds, key and file) of the slowest samples, slowest first. ``notes``: what could not
    be measured, in sentences.
    """

    loader: LoaderKind
    samples: int
    batch_size: int
    workers: int
    prefetch: int
    in_order: bool
    max_lateness: int
    rank: int
    ranks: int
    cores: float
    prepare_s: tuple[float, ...]
    prepare_cpu_share: float
    collate_s: float
    step_s: tuple[float, ...]
    transfer_s: float
    loader_s: float
    startup_s: float
    storage: Storage | None = None
    scaling: tuple[tuple[int, float], ...] = ()
    stages_s: Mapping[str, float] = field(default_factory=dict)
    phases: Mapping[str, Phase] = field(default_factory=dict)
    step_cpu_share: float = 0.0
    persistent: bool = False
    overlap: bool = False
    shards: int = 1
    worker_kind: Literal["process", "thread"] = "process"
    pin_memory: bool = False
    slowest: tuple[tuple[float, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def batches(self) -> int:
        """Number of batches of an epoch."""
        return -(-self.samples // self.batch_size)

    @property
    def carried(self) -> float:
        """Number of workers that the cores carry: one that waits leaves its core to others."""
        return max(1.0, self.cores / max(self.prepare_cpu_share, 0.01))

    @property
    def suffices(self) -> bool:
        """True where there is a sample, a step and an epoch's length to predict from."""
        return bool(self.prepare_s and self.step_s) and self.samples > 0


def mean(values: Iterable[float]) -> float:
    """Returns the mean; 0 of no values."""
    return fmean(found) if (found := list(values)) else 0.0


@dataclass(frozen=True)
class Setting:
    """The changes to a measured rank; None leaves it as it was measured."""

    loader: LoaderKind | None = None
    workers: int | None = None
    cache: float | None = None  # share of the set's bytes that a cache in memory may keep
    bytes_per_s: float | None = None
    latency_s: float | None = None

    def applied(self, profile: Profile) -> Profile:
        """Returns the profile of the measured rank in this setting. ``cache`` changes nothing in it, nor do a rate and
        a latency where no read was seen (``storage`` is None)."""
        found = profile if self.workers is None else replace(profile, workers=self.workers)
        if self.loader is not None and self.loader != profile.loader:
            found = replace(found, loader=self.loader, overlap=False)  # a script would have to tell its epochs
        changes = {"bytes_per_s": self.bytes_per_s, "latency_s": self.latency_s}
        given = {name: value for name, value in changes.items() if value is not None}
        return replace(found, storage=replace(found.storage, **given)) if given and found.storage else found


@dataclass(frozen=True)
class Trial:
    """A setting that was tried, or why it could not be."""

    setting: Setting
    epoch_s: float | None = None  # seconds of an epoch
    why_not: str = ""
