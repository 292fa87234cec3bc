"""The measurements of one rank so far, and the profile that they make."""

from __future__ import annotations

import math
from collections.abc import Sequence

from minato_gpu.lab.analysis.phases import Meter
from minato_gpu.lab.analysis.profile import Profile, Storage, mean
from minato_gpu.lab.analysis.stopwatch import Collated, Seen
from minato_gpu.lab.analysis.subject import Subject
from minato_gpu.samples import JSON
from minato_gpu.util.threads import usable_cores

_SLOWEST = 10
_PREFETCH = 2  # batches for each worker, PyTorch's default


class Findings:
    """Measurements of one rank. ``files``: of the samples seen; ``nbytes``, ``requests``: of a sample, 0 where
    none was seen."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.meters = {name: Meter() for name in ("sight", "compute", "copied", "warm", "cold")}
        self.batches_seen = 0
        self.files: list[str] = []
        self.nbytes = self.requests = 0.0
        self.cold_share: float | None = None  # of the files' bytes, in the page cache though dropped; None: unknown
        self.rate_and_latency: tuple[float, float] | None = None  # of storage: bytes a second, and seconds
        self.scaling: list[tuple[int, float]] = []  # workers, and samples a second
        self.notes: list[str] = []
        self._samples: dict[str, list[Seen]] = {}
        self._batches: dict[str, list[Collated]] = {}

    def note(self, sentence: str) -> None:
        """Adds a sentence on what was not measured, unless it was added before."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def noted(self, name: str) -> None:
        """Takes in the workers' notes of a phase so far; of ``sight``, also the files that were found."""
        samples, self._batches[name] = self.subject.book(name).read()
        self._samples[name] = samples
        if name == "sight":
            self.files = list(dict.fromkeys(path for seen in samples for path in seen.opened.files))
            self.nbytes = mean(seen.opened.nbytes for seen in samples)
            self.requests = mean(seen.opened.requests for seen in samples)

    def seconds_of(self, name: str) -> float:
        """Returns a worker's mean seconds for a sample in this phase; 0 where there is none."""
        return mean(seen.seconds for seen in self._samples.get(name, []))

    # --- the profile ---------------------------------------------------------------------------------------

    def profile(self, rank: int, ranks: int) -> Profile:
        """Returns the profile so far."""
        subject, loader, compute = self.subject, self.subject.loader, self.meters["compute"]
        options, epochs = subject.options, getattr(loader, "epochs", None)
        samples = self._samples.get("warm") or self._samples.get("sight") or []
        batches = self._batches.get("warm") or self._batches.get("sight") or []
        steps = math.fsum(compute.steps)
        whole = math.fsum(seen.seconds for seen in samples)
        on_core = math.fsum(seen.cpu_s for seen in samples)
        return Profile(
            loader=subject.kind,
            samples=subject.samples,
            batch_size=subject.batch_size,
            workers=subject.workers,
            prefetch=loader.prefetch_factor or _PREFETCH,
            in_order=bool(getattr(loader, "in_order", True)),
            max_lateness=0 if options is None else options.lateness,
            rank=rank,
            ranks=ranks,
            cores=_cores(usable_cores(), ranks),
            prepare_s=tuple(seen.seconds for seen in samples),
            prepare_cpu_share=min(1.0, on_core / whole) if whole else 1.0,
            collate_s=mean(each.seconds for each in batches),
            step_s=tuple(compute.steps),
            transfer_s=self._transfer_s(),
            loader_s=self._loader_s(samples),
            startup_s=self.meters["sight"].first_wait or 0.0,
            storage=self._storage(),
            scaling=tuple(sorted(self.scaling)),
            stages_s=_stages(samples),
            phases={name: meter.phase() for name, meter in self.meters.items() if meter.steps and name != "copied"},
            worker_kind="thread" if options is not None and options.threads else "process",
            pin_memory=bool(loader.pin_memory),
            step_cpu_share=math.fsum(compute.cpus) / steps if steps else 0.0,
            persistent=bool(loader.persistent_workers or epochs),
            overlap=epochs is not None,
            shards=int(getattr(loader.sampler, "num_replicas", 1)),
            slowest=tuple(self._slowest(samples)),
            notes=tuple(self.notes),
        )

    def _transfer_s(self) -> float:
        copied = self.meters["copied"]
        return max(0.0, copied.phase().each_s - self.meters["compute"].phase().each_s) if copied.steps else 0.0

    def _loader_s(self, samples: Sequence[Seen]) -> float:
        """Returns the CPU seconds of the consumer's thread while it waits for a batch, preparation left out."""
        warm_s = self.meters["warm"].cpu_s
        if self.subject.workers:
            return warm_s
        each = mean(seen.cpu_s for seen in samples)
        collate = mean(one.cpu_s for one in self._batches.get("warm", []))
        return max(0.0, warm_s - each * self.subject.batch_size - collate)

    def _storage(self) -> Storage | None:
        if self.rate_and_latency is None:
            return None
        rate, latency = self.rate_and_latency
        at_once = max(1, self.subject.workers)
        return Storage(rate, latency, self.requests or 1.0, self.nbytes, at_once, self.cold_share)

    def _slowest(self, samples: Sequence[Seen]) -> list[tuple[float, str]]:
        at = {str(seen.key): ", ".join(seen.opened.files[:3]) for seen in self._samples.get("sight", [])}
        once: dict[str, Seen] = {}  # each key where it took longest
        for seen in sorted(samples, key=lambda seen: -seen.seconds):
            once.setdefault(str(seen.key), seen)
        found = list(once.items())[:_SLOWEST]
        return [(seen.seconds, _named(seen.key, at.get(key, ""))) for key, seen in found]


def _named(key: JSON, path: str) -> str:
    name = "a sample of a stream" if key is None else f"key {key}"
    return f"{name}: {path}" if path else name


def _cores(usable: int, ranks: int) -> float:
    """Returns a rank's share of the cores that all ranks may use: part of a core if there are fewer than ranks."""
    return usable // ranks if usable >= ranks else usable / ranks


def _stages(samples: Sequence[Seen]) -> dict[str, float]:
    """Returns the mean seconds of a sample in each stage of the pipeline."""
    found: dict[str, float] = {}
    for seen in samples:
        for name, seconds in seen.stages.items():
            found[name] = found.get(name, 0.0) + seconds
    return {name: seconds / len(samples) for name, seconds in found.items()}
