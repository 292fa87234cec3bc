"""This loader beside its peers in pairs, by a protocol that gives no loader an advantage.

Six classes of work (``kinds.py``): light and heavy photographs, text of fixed and of variable length, arrays, rows of
an Arrow table. ``--workers``: 2 and 4 prepare samples really; 16 are emulated (samples sleep for their cost), with
processes only (of torchdata and SPDL's pipelines three settings).

1. *Equal budgets.* Each loader's settings are tried six times, for a sixth of a run each; the fastest is measured.
   ``--order any``: batches may come in any order; else only loaders that keep it.
2. *Pairs.* This loader, PyTorch's and the best of the other peers (``--all``: every one) run one after another, each in
   a fresh process, in alternating order: A B C, C B A, and so on. Start and warm-up are not counted.
3. ``samples_per_s``: of a run without steps. ``ratio``: this loader's by the peer's, the geometric mean of the pairs,
   with a 95 % bootstrap interval (``turns.paired``).
4. ``penalty``: with emulated steps, equal for all, a quarter longer than the fastest loader takes for a batch: how much
   longer a batch takes than from a feeder that costs nothing, whose batches lie ready in memory.

Within each run all complete epochs are checked to hold every sample once, and the first batches to be what one process
prepares. The full protocol is the default (5 pairs of 60 s; some four hours for one number of workers); a shorter one
that fits half an hour: ``--seconds 5 --workers 2``.

Not here: PyTorch's loader with threads, which 2.13 has not (``torchdata.nodes`` has); SPDL's regions in order, and in
subinterpreters (Python 3.14); DALI for other than photographs. TensorSocket is for jobs: see ``node_prepared``.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from benchmarks import report
from benchmarks.compare.dali import DaliReaders
from benchmarks.compare.run import allowed, compare_content
from benchmarks.compare.workloads import INDEX, read_bytes
from benchmarks.isolate import isolated, tree_cpu_s
from benchmarks.kinds import KINDS, Kind
from benchmarks.peers import Job, Loader, installed
from benchmarks.peers.dali import DaliDynamic, DaliProxy
from benchmarks.peers.minato import Minato
from benchmarks.peers.pytorch import PyTorch
from benchmarks.peers.spdl import SpdlLoader, SpdlPool, SpdlRegion, SpdlSharded, SpdlSubprocess
from benchmarks.peers.torchdata import TorchdataNodes
from benchmarks.turns import Row, fastest, measured_rows, ratio_columns
from benchmarks.work import ContentError, sleep_overshoot_s

EMULATED = 16
TRIALS = 6
OURS, PYTORCH, FEEDER = "minato_gpu", "PyTorch", "a feeder that costs nothing"
_LOAD = 0.8  # of steps: what the fastest loader needs for a batch
_CHECKED = 3  # batches whose content is compared
_READY_BYTES = 64 << 20


def trials(kind: Kind, workers: int, in_order: bool) -> dict[str, Sequence[Loader]]:
    """Each peer with the settings that are tried."""
    found: dict[str, list[Loader]] = {
        OURS: [
            Minato(OURS, in_order, lanes, prefetch)
            for lanes in (((), ("cpu",), ("device",)) if kind.pictures and workers != EMULATED else ((),))
            for prefetch in ((None, 4) if kind.pictures and workers != EMULATED else (None, 1, 3, 4, 8, 16))
        ],
        PYTORCH: [
            PyTorch(PYTORCH, in_order, prefetch, sharing=sharing)
            for prefetch in (2, 4, 8)
            for sharing in ("file_descriptor", "file_system")
        ],
        "torchdata": [
            TorchdataNodes("torchdata", processes, in_order, by_batch, prefetch)
            for processes in (True, False)
            for by_batch, prefetch in ((True, 0), (True, 4), (False, 4))
        ],
        "SPDL get_pytorch_dataloader": [
            SpdlLoader("SPDL get_pytorch_dataloader", in_order, prefetch) for prefetch in (1, 2, 4, 8, 16, 32)
        ],
        "SPDL pipeline": [
            SpdlPool("SPDL pipeline", processes, in_order, by_batch, concurrency, calls)
            for processes in (True, False)
            for by_batch, concurrency, calls in ((True, None, 1), (True, None, 2), (False, 32, 1))
        ],
        "SPDL subprocesses": [SpdlSharded("SPDL subprocesses", buffer) for buffer in (1, 2, 3, 4, 6, 8)],
    }
    if not in_order:
        found["SPDL regions"] = [
            SpdlRegion("SPDL regions", by_batch, buffer)
            for by_batch, buffers in ((True, (1, 2, 4)), (False, (1, 16, 64)))
            for buffer in buffers
        ]
        if workers != EMULATED:
            found["SPDL pipeline"][-1] = SpdlSubprocess("SPDL pipeline", by_batch=True)
    if workers == EMULATED:  # threads would sleep side by side as they could not work
        return {name: [each for each in tried if getattr(each, "processes", True)] for name, tried in found.items()}
    if kind.pictures:
        found["DALI readers"] = [DaliReaders("DALI readers", prefetch) for prefetch in (1, 2, 3, 4, 6, 8)]
        found["DALI dynamic"] = [
            DaliDynamic("DALI dynamic", capture, more) for capture in (True, False) for more in (0, 1, 2)
        ]
        found["DALI proxy"] = [
            DaliProxy("DALI proxy", prefetch, readers) for readers in (1, 2) for prefetch in (2, 4, 8)
        ]
    return found  # type: ignore[return-value]


@dataclass(frozen=True)
class Feeder(Loader):
    """Batches that lie ready in memory, over and over."""

    package = "torch"
    own_draws = True

    name: str = FEEDER

    def settings(self, job: Job) -> dict[str, Any]:
        return {"batches": self._count(job)}

    def make(self, job: Job) -> Iterable[Any]:
        ready = [job.join([job.dataset[index] for index in each]) for each in job.batches[: self._count(job)]]
        while True:
            yield from ready

    @staticmethod
    def _count(job: Job) -> int:
        return max(2, min(32, _READY_BYTES // job.batch_bytes))


# --- a run ------------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """``cpu_us``: of all processes, a sample, without steps. ``batch_ms``: with steps (0: there were none)."""

    samples_per_s: float
    cpu_us: float
    batch_ms: float


class Consumer:
    """Reads every byte of a loader's batches, epoch after epoch, and notes what came."""

    def __init__(self, loader: Loader, job: Job) -> None:
        self._loader, self._made = loader, loader.make(job)
        self._batches, self._overshoot_s = self._endless(), sleep_overshoot_s()
        self.epochs: list[list[Any]] = []
        self.kept: list[Any] = []

    def _endless(self) -> Iterator[Any]:
        while True:
            self.epochs.append([])
            yield from self._made
            if not self.epochs[-1]:
                raise RuntimeError(f"{self._loader.name} has delivered nothing in an epoch")

    def consume(self, seconds: float, step_s: float = 0.0, least: int = 1) -> tuple[int, int, float]:
        """For so long, and at least so many batches; samples, batches and seconds."""
        start = now = time.perf_counter()
        samples = count = 0
        while now - start < seconds or count < least:
            batch = next(self._batches)
            until = time.perf_counter() + step_s - self._overshoot_s
            read_bytes(batch)
            self.epochs[-1].append(_indices(batch).copy())
            if len(self.kept) < _CHECKED:
                self.kept.append(copy.deepcopy(batch))
            if step_s:
                time.sleep(max(0.0, until - time.perf_counter()))
            samples, count, now = samples + len(self.epochs[-1][-1]), count + 1, time.perf_counter()
        return samples, count, now - start

    def check(self, job: Job) -> None:
        """Raises ContentError where a sample of a complete epoch is missing or came twice, or one is changed."""
        if isinstance(self._loader, Feeder):
            return
        for epoch in self.epochs[:-1]:
            if not np.array_equal(np.sort(np.concatenate(epoch)), range(len(job.dataset))):
                raise ContentError("samples that did not come once in an epoch")
        if self._loader.own_draws:
            return
        if job.pipeline is not None:
            compare_content(self.kept, job, allowed(job, self._loader))
            return
        for batch in self.kept:
            expected = job.join([job.dataset[index] for index in _indices(batch).tolist()])
            pairs = [(expected[name], batch[name]) for name in expected] if isinstance(batch, dict) else []
            for one, other in pairs or [(expected, batch)]:
                if not np.array_equal(np.asarray(one), np.asarray(other)):
                    raise ContentError(f"samples {_indices(batch)[:5]} are changed")


def _indices(batch: Any) -> Any:
    return np.asarray(batch[INDEX] if isinstance(batch, dict) else batch[:, 0])


def run(job: Job, loader: Loader, seconds: float, step_s: float) -> Run:
    """One run; call it in a fresh process. Half as long again with steps, where there are any."""
    consumer = Consumer(loader, job)
    consumer.consume(min(1.0, seconds / 4), least=2 * job.workers + 2)
    cpu_s = tree_cpu_s()
    samples, _, bare_s = consumer.consume(seconds)
    cpu_s = tree_cpu_s() - cpu_s
    batch_s = 0.0
    if step_s:
        consumer.consume(min(1.0, seconds / 8), step_s)
        _, batches, stepped_s = consumer.consume(seconds / 2, step_s)
        batch_s = stepped_s / batches
    consumer.check(job)
    return Run(samples / bare_s, 1e6 * cpu_s / samples, 1e3 * batch_s)


# --- the protocol -----------------------------------------------------------------------------------------------------


def case_rows(kind: Kind, job: Job, in_order: bool, seconds: float, pairs: int, *, every: bool) -> Iterator[Row]:
    """A row for each loader."""
    case = f"{kind.name}, {job.workers}{' emulated' if job.workers == EMULATED else ''} workers"
    tuned_s = seconds / TRIALS

    def rate(loader: Loader) -> float:
        return isolated(run, job, loader, tuned_s, 0.0, timeout_s=30 + 10 * tuned_s, settle_s=0.1).samples_per_s

    chosen: dict[str, tuple[float, Loader]] = {}
    for name, tried in trials(kind, job.workers, in_order).items():
        here = installed(tried[0]) and tried[0].can_run(job)
        if here and (best := fastest(case, tried, rate)):
            chosen[name] = best
    others = sorted(chosen.keys() - {OURS, PYTORCH}, key=lambda name: -chosen[name][0])
    step_s = job.batch_size / max(rate for rate, _ in chosen.values()) / _LOAD
    names = [name for name in (OURS, PYTORCH, *(others if every else others[:1])) if name in chosen]
    loaders = [*(chosen[name][1] for name in names), Feeder()]

    def measure(loader: Loader) -> Run:
        return isolated(run, job, loader, seconds, step_s, timeout_s=60 + 10 * seconds)

    rows, runs = measured_rows(case, loaders, pairs, measure, alternate=True)
    for row, loader in zip(rows, loaders, strict=True):
        name, found = loader.name, runs[loader.name]
        row |= {"class": kind.name, "workers": job.workers, "step_ms": 1e3 * step_s}
        row |= {"loader_settings": loader.described(job), "tuned_per_s": chosen[name][0] if name in chosen else None}
        if name != FEEDER and found and len(found) == len(runs[FEEDER]):
            row |= ratio_columns("batch_ratio", *([one.batch_ms for one in runs[each]] for each in (name, FEEDER)))
            row["penalty"] = row["batch_ratio"] - 1
        if name not in (FEEDER, OURS) and found and len(found) == len(runs[OURS]):
            row |= ratio_columns("ratio", *([one.samples_per_s for one in runs[each]] for each in (OURS, name)))
        yield row


@report.benchmark("paired", 5, trials=TRIALS)
@click.option("--class", "names", multiple=True, type=click.Choice(list(KINDS)), help="Default: all six.")
@click.option("--workers", "counts", multiple=True, type=click.IntRange(min=1), help="Default: 2, 4 and 16 (emulated).")
@click.option("--seconds", type=float, default=60.0, show_default=True, help="Of a run.")
@click.option("--order", type=click.Choice(["kept", "any"]), default="kept", show_default=True)
@click.option("--all", "every", is_flag=True, help="Measure every peer in pairs, not only the two.")
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), help="Keeps the photographs.")
def main(
    quick: bool,
    repetitions: int,
    names: Sequence[str],
    counts: Sequence[int],
    seconds: float,
    order: str,
    every: bool,
    data: Path | None,
) -> Iterator[Mapping[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        for name in names or list(KINDS):
            for workers in counts or ((2,) if quick else (2, 4, EMULATED)):
                job = KINDS[name].job(data or Path(scratch), workers, emulated=workers == EMULATED, quick=quick)
                duration = 0.2 if quick else seconds
                yield from case_rows(KINDS[name], job, order == "kept", duration, repetitions, every=every)


if __name__ == "__main__":
    main()
