"""Slow samples: how close every loader comes to the lower bound of the time that its work takes.

A consumer takes batch after batch and trains for a fixed time on each. That step is emulated: the consumer reads every
byte of the batch and sleeps for the rest of the step (an emulated accelerator, which takes no core). The work is so
many operations for each sample, the same for every loader.

    bound      = minimum to the first batch + max(steps, single-process CPU seconds / cores)
    efficiency = bound / measured

The minimum to the first batch is the work of the cheapest samples that make a batch, on all cores. Every loader runs
in a fresh process, after another that took one batch, so that its files are in memory. Its first batch is timed from
its construction, cold; that epoch goes on without steps and warms the workers up; then the clock starts for the epochs
that count. What a loader had prepared of those before the clock started (some overlap epochs) is taken off the work in
its bound, and what it prepares meanwhile for later ones is added, so that it neither gains nor loses by it. Loaders
take turns within each repetition.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks import report, work
from benchmarks.isolate import isolated, tree_cpu_s, tree_peak_rss_bytes
from benchmarks.peers import Job, Loader, take_one
from benchmarks.peers.minato import Minato
from benchmarks.peers.pytorch import PyTorch
from benchmarks.peers.spdl import SpdlPool, SpdlSharded, SpdlSubprocess
from benchmarks.peers.torchdata import TorchdataNodes
from benchmarks.turns import measured_rows, present, select
from benchmarks.work import (
    Consumer,
    Costly,
    Costs,
    Int64,
    WorkLog,
    calibrate,
    first_batch_s,
    kits19,
    sleep_overshoot_s,
    step,
)
from minato_gpu.util.threads import usable_cores


@dataclass(frozen=True)
class Case:
    """``costs(samples, workers, rng)`` is each sample's cost in milliseconds of one core.

    ``load`` is the consumer's demand: the work takes ``load`` times as long on all cores as the emulated steps do.
    ``words`` 64-bit integers make one sample. ``epochs`` are timed, after one that is not. ``trivial``: most samples
    cost so little that the peers are best off working batch by batch.
    """

    name: str
    costs: Callable[[int, int, np.random.Generator], Costs]
    samples: int
    batch_size: int
    load: float
    words: int = 18_816  # 147 KiB: 224 x 224 pixels of three bytes
    epochs: int = 1
    trivial: bool = False
    quick_samples: int = 48
    quick_epochs: int = 1


def scattered(samples: int, workers: int, rng: np.random.Generator) -> Costs:
    """5 % of the samples, anywhere, take 120 ms; the others 3 ms."""
    costs = np.full(samples, 3.0)
    costs[rng.choice(samples, max(1, round(0.05 * samples)), replace=False)] = 120.0
    return costs


def bursts(samples: int, workers: int, rng: np.random.Generator) -> Costs:
    """As many slow samples as ``scattered``, but in bursts of twice the worker count, evenly over the epoch."""
    costs = np.full(samples, 3.0)
    length = 2 * workers
    count = max(1, round(0.05 * samples / length))
    for start in np.linspace(0, samples - length, count + 2).astype(int)[1:-1]:
        costs[start : start + length] = 120.0
    return costs


def rare(samples: int, workers: int, rng: np.random.Generator) -> Costs:
    """0.1 % of otherwise trivial samples (0.02 ms) take a thousand times as long, which nothing foretells."""
    costs = np.full(samples, 0.02)
    costs[rng.choice(samples, max(1, round(0.001 * samples)), replace=False)] = 20.0
    return costs


CASES = (
    Case("scattered, 105 %", scattered, 1500, 16, load=1.05),
    Case("scattered, 81 %", scattered, 1500, 16, load=0.81),
    Case("bursts, 105 %", bursts, 1500, 16, load=1.05),
    Case("bursts, 81 %", bursts, 1500, 16, load=0.81),
    Case("short epochs, 105 %", kits19, 168, 3, load=1.05, epochs=40, quick_samples=12, quick_epochs=3),
    Case("short epochs, 81 %", kits19, 168, 3, load=0.81, epochs=40, quick_samples=12, quick_epochs=3),
    Case("rare, 81 %", rare, 24_000, 64, load=0.81, words=1536, trivial=True, quick_samples=1024),
)


COSTLY: tuple[Loader, ...] = (
    PyTorch("pytorch in order"),
    PyTorch("pytorch prefetch 8", prefetch_factor=8),
    PyTorch("pytorch out of order", in_order=False),
    PyTorch("pytorch out of order, prefetch 8", in_order=False, prefetch_factor=8),
    SpdlPool("spdl processes", processes=True, concurrency=4),
    SpdlPool("spdl processes in order", processes=True, in_order=True, concurrency=32),
    SpdlPool("spdl threads", processes=False),
    SpdlSubprocess("spdl threads in a subprocess"),
    TorchdataNodes("torchdata processes", processes=True),
    TorchdataNodes("torchdata processes in order", processes=True, in_order=True),
    TorchdataNodes("torchdata threads", processes=False),
    Minato("minato_gpu in order"),
    Minato("minato_gpu bounded", in_order=False),
)
"""For samples whose cost is what counts: every loader works sample by sample where it can."""

TRIVIAL: tuple[Loader, ...] = (
    PyTorch("pytorch in order"),
    PyTorch("pytorch prefetch 8", prefetch_factor=8),
    PyTorch("pytorch out of order", in_order=False),
    SpdlPool("spdl processes", processes=True, by_batch=True, concurrency=4),
    SpdlPool("spdl threads", processes=False, by_batch=True),
    SpdlSubprocess("spdl threads in a subprocess", by_batch=True),
    SpdlSharded("spdl plain subprocesses"),
    TorchdataNodes("torchdata processes", processes=True, by_batch=True, prefetch=0),
    TorchdataNodes("torchdata threads", processes=False, by_batch=True, prefetch=0),
    Minato("minato_gpu in order"),
    Minato("minato_gpu bounded", in_order=False),
)
"""For samples that cost next to nothing: every loader works batch by batch where it can."""


class Run(NamedTuple):
    """What one run measured; times in seconds. ``efficiency``: the bound over the elapsed time.

    ``prepared_ahead_s``: work for the timed epochs done before the clock started; ``left_ahead_s``: work for later ones
    done by its end; ``cpu_s``: of all processes, in between.
    """

    efficiency: float
    first_batch_s: float
    elapsed_s: float
    bound_s: float
    prepared_ahead_s: float
    left_ahead_s: float
    cpu_s: float
    peak_rss_bytes: int


@dataclass(frozen=True)
class Plan:
    """A case with everything fixed that its runs share.

    ``operations``: units of work of each sample, at least one. ``cpu_s`` is what one process, alone on the machine,
    needs for an epoch (CPU seconds); ``first_s`` the least time to any batch; ``expected`` each sample's row sum, from
    that process.
    """

    case: Case
    workers: int
    operations: NDArray[np.int64]
    expected: Int64
    epochs: int
    cpu_s: float
    first_s: float
    overshoot_s: float

    @classmethod
    def measured(cls, case: Case, workers: int, per_ms: float, overshoot_s: float, quick: bool) -> Plan:
        """Measure what the case's work costs here. ``quick``: at toy size."""
        samples = case.quick_samples if quick else case.samples
        costs_ms = case.costs(samples, workers, np.random.default_rng(11))
        operations = np.maximum(1, np.rint(costs_ms * per_ms)).astype(np.int64)
        dataset = Costly(operations, case.words)
        expected, cpu_s = _alone(dataset)
        per_operation = cpu_s / float(operations.sum())
        cheapest = np.sort(operations)[: case.batch_size] * per_operation
        return cls(
            case=case,
            workers=workers,
            operations=operations,
            expected=expected,
            epochs=case.quick_epochs if quick else case.epochs,
            cpu_s=cpu_s,
            first_s=first_batch_s(cheapest, usable_cores()),
            overshoot_s=overshoot_s,
        )

    @property
    def batches(self) -> int:
        """Batches of one epoch."""
        return -(-len(self.operations) // self.case.batch_size)

    @property
    def step_s(self) -> float:
        """The emulated step: the work of an epoch takes ``load`` times as long on all cores as its steps."""
        return self.cpu_s / usable_cores() / self.case.load / self.batches

    def bound_s(self, ahead_s: float = 0.0, left_s: float = 0.0) -> float:
        """The least time for the timed epochs (see ``work.bound_s``)."""
        work_s, steps_s = self.epochs * self.cpu_s, self.epochs * self.batches * self.step_s
        return work.bound_s(self.first_s, work_s, steps_s, usable_cores(), ahead_s, left_s)

    def job(self, log: WorkLog | None = None) -> Job:
        """What the loaders are asked to do; ``log`` notes when each sample is prepared."""
        dataset = Costly(self.operations, self.case.words, log)
        return Job(dataset, self.case.batch_size, self.workers, 8 * self.case.words, keep_workers=True)


def run(plan: Plan, loader: Loader) -> Run:
    """Measure one loader; call it in a fresh process. Raises ContentError where a sample is lost or changed."""
    log = WorkLog(len(plan.operations), 2 + plan.epochs)
    job = plan.job(log)
    start = time.perf_counter()
    made = loader.make(job)
    first_batch_s = _warm_up(made, plan) - start
    consumer, step_s = Consumer(), plan.step_s - plan.overshoot_s
    cpu_s, clock, moment = tree_cpu_s(), time.perf_counter(), time.monotonic()
    for _ in range(plan.epochs):
        for batch in made:
            step(consumer, batch, step_s)
    elapsed_s, end, cpu_s = time.perf_counter() - clock, time.monotonic(), tree_cpu_s() - cpu_s
    ahead_s, left_s = log.done_before(moment, 1), log.done_before(end, 1 + plan.epochs)
    bound_s = plan.bound_s(ahead_s, left_s)
    outcome = Run(
        efficiency=bound_s / elapsed_s,
        first_batch_s=first_batch_s,
        elapsed_s=elapsed_s,
        bound_s=bound_s,
        prepared_ahead_s=ahead_s,
        left_ahead_s=left_s,
        cpu_s=cpu_s,
        peak_rss_bytes=tree_peak_rss_bytes(),
    )
    consumer.check(plan.expected, plan.epochs)
    return outcome


def _warm_up(made: Iterable[Any], plan: Plan) -> float:
    """One epoch without steps; the moment (``time.perf_counter``) of its first batch.

    No batch is held longer than until the next one, as in a training loop: SPDL's arena waits for old ones.
    """
    consumer = Consumer()
    first = 0.0
    for batch in made:
        first = first or time.perf_counter()
        consumer.read(batch)
    consumer.check(plan.expected)
    return first


def _alone(dataset: Costly) -> tuple[Int64, float]:
    """Every sample's row sum, and the CPU seconds that this process took to prepare them."""
    sums = np.empty(len(dataset), dtype=np.int64)
    reading_s = 0.0
    start = time.process_time()
    for index in range(len(dataset)):
        row = dataset[index]
        reading = time.process_time()
        sums[index] = row.sum()  # the consumer's work, not the loader's
        reading_s += time.process_time() - reading
    return sums, time.process_time() - start - reading_s


# --- rows -------------------------------------------------------------------------------------------------------------


def case_rows(plan: Plan, loaders: Sequence[Loader], repetitions: int) -> Iterator[dict[str, Any]]:
    """A row for each loader on one case; the loaders take turns within each repetition."""
    timeout_s = 60 + 20 * plan.bound_s()

    def measure(loader: Loader) -> Run:
        isolated(take_one, loader, plan.job(), timeout_s=timeout_s)
        return isolated(run, plan, loader, timeout_s=timeout_s)

    rows, _ = measured_rows(plan.case.name, loaders, repetitions, measure)
    for row, loader in zip(rows, loaders, strict=True):
        row |= {
            "emulated_step_s": plan.step_s,
            "cpu_s_alone": plan.cpu_s,
            "loader_settings": loader.described(plan.job()),
        }
        yield row


@report.benchmark("tails", 3, step="emulated")
@report.loader_option
@report.case_option
@report.workers_option
def main(
    quick: bool, repetitions: int, wanted: Sequence[str], names: Sequence[str], workers: int
) -> Iterator[dict[str, Any]]:
    cases, loaders = select("case", CASES, names), present([*COSTLY, *TRIVIAL], wanted)
    per_ms = calibrate() * (0.1 if quick else 1.0)  # a toy run takes a tenth of the work for each sample, too
    overshoot_s = sleep_overshoot_s()
    for case in cases:
        plan = isolated(Plan.measured, case, workers, per_ms, overshoot_s, quick)
        chosen = [loader for loader in (TRIVIAL if case.trivial else COSTLY) if loader in loaders]
        yield from case_rows(plan, chosen, repetitions)


if __name__ == "__main__":
    main()
