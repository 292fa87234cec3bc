"""The measurements of one rank of a training script, and another setting of it: plain data.

The model is DS-Analyzer's (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021): rates of
fetching (F), preparing (P) and training (G), each measured while the other two cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal

from minato_gpu.samples import JSON

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
    """One phase of the analysis: so many batches in so many seconds, of which the consumer waited ``wait_s``.

    ``batch_s``: seconds of each batch, its wait and its step; from these comes the noise.
    """

    batches: int
    seconds: float
    wait_s: float
    batch_s: tuple[float, ...] = ()

    @property
    def each_s(self) -> float:
        """Seconds of a batch, on average; 0 where there was none."""
        return self.seconds / self.batches if self.batches else 0.0


@dataclass(frozen=True)
class Profile:
    """One rank's epoch.

    ``samples``: of an epoch. ``prefetch``: batches for each worker. ``cores``: that this rank may use, a part of one
    where ranks outnumber them. ``prepare_s``: seconds of one worker for each sample that was seen while its bytes were
    in memory, in the sampler's order; ``prepare_cpu_share``: of these, what was computed and not waited. ``collate_s``:
    of a batch. ``step_s``: of each training step with a batch that was there already, its transfer left out;
    ``transfer_s``: of a batch to the device. ``loader_s``: what the loader itself costs the consumer's thread, of a
    batch. ``startup_s``: until the first batch. ``scaling``: (workers, samples a second), as far as it was tried.
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
    def suffices(self) -> bool:
        """True where there is a sample, a step and an epoch's length to predict from."""
        return bool(self.prepare_s and self.step_s) and self.samples > 0


def profile_from(data: Mapping[str, JSON]) -> Profile:
    """Makes a profile of what ``asdict`` gave, perhaps through a file. Raises TypeError or KeyError where it is another
    thing."""
    values = with_tuples(dict(data))
    if values.get("storage") is not None:
        values["storage"] = Storage(**values["storage"])
    values["phases"] = {name: Phase(**each) for name, each in values.get("phases", {}).items()}
    return Profile(**values)


def with_tuples(value: JSON) -> JSON:
    """Returns plain data with tuples, as dataclasses have them, in the place of a file's lists, at any depth."""
    if isinstance(value, dict):
        return {name: with_tuples(each) for name, each in value.items()}
    return tuple(map(with_tuples, value)) if isinstance(value, (list, tuple)) else value


def mean(values: Iterable[float]) -> float:
    """Returns the mean; 0 of no values."""
    return fmean(found) if (found := list(values)) else 0.0


class CannotTry(Exception):
    """A setting that cannot be run here, and why."""


@dataclass(frozen=True)
class Setting:
    """The changes to a measured rank; None leaves it as it was measured."""

    loader: LoaderKind | None = None
    workers: int | None = None
    cache: float | None = None  # share of the set's bytes that a cache in memory may keep
    bytes_per_s: float | None = None
    latency_s: float | None = None

    def applied(self, profile: Profile) -> Profile:
        """Returns the profile of the measured rank in this setting. Raises ValueError where the profile knows nothing
        of what is to change."""
        found = profile if self.workers is None else replace(profile, workers=self.workers)
        if self.loader is not None and self.loader != profile.loader:
            found = replace(found, loader=self.loader, overlap=False)  # a script would have to tell its epochs
        storage = found.storage
        if self.bytes_per_s is None and self.latency_s is None:
            return found
        if storage is None:
            raise ValueError("no read was seen when this profile was measured: what storage gives cannot be changed")
        rate = storage.bytes_per_s if self.bytes_per_s is None else self.bytes_per_s
        latency = storage.latency_s if self.latency_s is None else self.latency_s
        return replace(found, storage=replace(storage, bytes_per_s=rate, latency_s=latency))


@dataclass(frozen=True)
class Trial:
    """A setting that was tried, or why it could not be."""

    setting: Setting
    epoch_s: float | None = None  # seconds of an epoch
    why_not: str = ""
