"""One run of one loader on one cell, and the bound that it is measured against."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.isolate import descendants_cpu_s, together
from benchmarks.peers import Loader
from benchmarks.scaling.cells import BATCH_SIZE, Cell, job
from benchmarks.work import Consumer, Int64, Slept, WorkLog, reference, sleep_overshoot_s, step

_EPOCHS = 3  # the first, the one that is measured, and the one whose consumer's batches are ready
_READY = 1.6  # a consumer whose batch is ready takes so many times as long for it as the loader does
_LEAST_STEP_S = 0.004
_NEXTS, _NEXTS_S = 128, 3.0
_WARM_NEXTS = 4  # after the start of an epoch, not counted


@dataclass(frozen=True)
class Bare:
    """So many processes that prepare samples and throw them away.

    ``beyond_s``: seconds that a sample takes beyond the sleep that it asks for (the median of all). ``asked_s`` of
    ``elapsed_s`` the processes were to sleep, for ``samples`` together, with ``cpu_s``.
    """

    beyond_s: float
    asked_s: float
    elapsed_s: float
    samples: int
    cpu_s: float

    @property
    def cpu_s_per_sample(self) -> float:
        """CPU seconds of a sample."""
        return self.cpu_s / self.samples


def bare(costs_s: NDArray[np.float64], workers: int, seconds: float) -> Bare:
    """Let ``workers`` processes without any loader prepare samples for so long. Call it in a fresh process."""
    late, *sums = zip(*together(workers, _prepare, costs_s, seconds), strict=True)
    return Bare(max(0.0, float(np.median(np.concatenate(late)))), *map(sum, sums))


def _prepare(number: int, barrier: Barrier, costs_s: NDArray[np.float64], seconds: float) -> tuple[Any, ...]:
    dataset = Slept(costs_s)
    order = np.random.default_rng(number).permutation(len(costs_s))
    barrier.wait()
    start, cpu_s = time.perf_counter(), time.process_time()
    asked_s = 0.0
    late: list[float] = []
    now = start
    while now - start < seconds:
        index = int(order[len(late) % len(order)])
        dataset[index]
        before, now = now, time.perf_counter()
        late.append(now - before - float(costs_s[index]))
        asked_s += float(costs_s[index])
    return late, asked_s, now - start, len(late), time.process_time() - cpu_s


@dataclass(frozen=True)
class Plan:
    """A cell with everything fixed that its runs share.

    ``alone`` and ``together``: one bare process, and as many as there are workers. ``expected``: each sample's sum.
    """

    cell: Cell
    costs_s: NDArray[np.float64]
    expected: Int64
    alone: Bare
    together: Bare
    step_overshoot_s: float

    @classmethod
    def measured(cls, cell: Cell, batches: int | None, bare_s: float) -> Plan:
        """Measure what the cell's samples take here, in ``bare_s`` seconds. ``batches`` of an epoch, if not as many as
        the cell says."""
        costs_s = cell.costs_s(BATCH_SIZE * batches if batches else cell.samples)
        expected = reference(Slept(np.zeros(len(costs_s))))
        alone, all_workers = bare(costs_s, 1, bare_s), bare(costs_s, cell.workers, bare_s)
        return cls(cell, costs_s, expected, alone, all_workers, sleep_overshoot_s())

    @property
    def worth_s(self) -> NDArray[np.float64]:
        """Seconds that each sample keeps a worker: its sleep, and what it takes beyond in a process alone."""
        return self.costs_s + self.alone.beyond_s

    @property
    def batches(self) -> int:
        """Batches of an epoch."""
        return len(self.costs_s) // BATCH_SIZE

    @property
    def work_s(self) -> float:
        """The least seconds for an epoch's samples, on all workers."""
        return float(self.worth_s.sum()) / self.cell.workers

    @property
    def step_s(self) -> float:
        """The emulated step: an epoch's work takes ``load`` times as long as its steps."""
        return self.work_s / self.cell.load / self.batches if self.cell.load else 0.0

    @property
    def bare_of_bound(self) -> float:
        """What as many processes reach without a loader: what this machine takes off any loader."""
        count = self.together.samples
        return (self.together.asked_s + count * self.alone.beyond_s) / self.together.elapsed_s

    def bound_s(self, ahead_s: float = 0.0, left_s: float = 0.0) -> float:
        """The least seconds for an epoch with its steps.

        ``ahead_s`` of its work had been done before it began, ``left_s`` more was done for the next (seconds of one
        worker).
        """
        working_s = max(0.0, self.work_s + (left_s - ahead_s) / self.cell.workers)
        return max(working_s + self.step_s, self.batches * self.step_s)


class Run(NamedTuple):
    """What one run measured; CPU microseconds of the second epoch, by its samples.

    ``main``: the training process, all its threads, its consumer included; ``workers``: all its descendants, the
    samples' own work included. ``next``: of a consumer whose batch is ready.
    """

    samples_per_s: float
    of_bound: float
    first_batch_s: float
    main_us_per_sample: float
    workers_us_per_sample: float
    next_us_p50: float
    next_us_p99: float

    @property
    def cpu_s_per_sample(self) -> float:
        """CPU seconds of a sample in all processes."""
        return 1e-6 * (self.main_us_per_sample + self.workers_us_per_sample)


def run(plan: Plan, loader: Loader) -> Run:
    """Measure one loader; call it in a fresh process. Raises ContentError where a sample is lost or changed."""
    count = len(plan.costs_s)
    log = WorkLog(count, 1 + _EPOCHS)
    asked = job(plan.cell, Slept(plan.costs_s, log=log))
    consumer = Consumer()
    start = time.perf_counter()
    made = loader.make(asked)
    first = _epoch(made, plan, consumer)
    workers_s, main_s, clock, moment = descendants_cpu_s(), time.process_time(), time.perf_counter(), time.monotonic()
    _epoch(made, plan, consumer)
    elapsed_s, end, main_s = time.perf_counter() - clock, time.monotonic(), time.process_time() - main_s
    workers_s = descendants_cpu_s() - workers_s
    ahead_s, left_s = log.done_before(moment, 1, plan.worth_s), log.done_before(end, 2, plan.worth_s)
    consumer.check(plan.expected, 2)
    nexts_s = _nexts(made, elapsed_s / plan.batches)
    p50, p99 = np.percentile(nexts_s, [50, 99]) if nexts_s else (float("nan"), float("nan"))
    return Run(
        samples_per_s=count / elapsed_s,
        of_bound=plan.bound_s(ahead_s, left_s) / elapsed_s,
        first_batch_s=first - start,
        main_us_per_sample=1e6 * main_s / count,
        workers_us_per_sample=1e6 * workers_s / count,
        next_us_p50=1e6 * float(p50),
        next_us_p99=1e6 * float(p99),
    )


def _epoch(made: Iterable[Any], plan: Plan, consumer: Consumer) -> float:
    """One epoch; returns the moment of its first batch."""
    first = 0.0
    for batch in made:
        first = first or time.perf_counter()
        if plan.cell.load:
            step(consumer, batch, plan.step_s - plan.step_overshoot_s)
        else:
            consumer.read(batch)
    return first


def _nexts(made: Iterable[Any], batch_s: float) -> list[float]:
    """Seconds of each ``next`` of a consumer that leaves the loader more time than it needs."""
    step_s = max(_LEAST_STEP_S, _READY * batch_s)
    end = time.perf_counter() + _NEXTS_S
    took: list[float] = []
    consumer, batches = Consumer(), iter(made)
    while len(took) < _NEXTS + _WARM_NEXTS and time.perf_counter() < end:
        start = time.perf_counter()
        batch = next(batches, None)
        took.append(time.perf_counter() - start)
        if batch is None:
            break
        step(consumer, batch, step_s)
    return took[_WARM_NEXTS:-1]
