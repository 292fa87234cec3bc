"""One run of one loader on one case."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.compare.case import Case
from benchmarks.compare.content import Reader, same_content
from benchmarks.compare.workloads import Begun, Indexed, Prepared, job
from benchmarks.isolate import tree_cpu_s, tree_pss_bytes
from benchmarks.peers import Job, Loader
from minato_gpu.parity import whole_tolerance
from minato_gpu.stages import Tolerance

_CHECKED = 3  # batches whose content is compared
_WATCH_S = 0.02


@dataclass(frozen=True)
class Run:
    """What one run measured. ``settings``: of the loader."""

    samples_per_s: float
    efficiency: float
    au: float
    first_batch_s: float
    epoch_gap_s: float
    wait_p50_s: float
    wait_p95_s: float
    wait_p99_s: float
    cpu_s_per_sample: float
    lateness_max: float
    settings: str


def run(case: Case, loader: Loader) -> Run:
    """Measure one loader; call it in a fresh process. Raises ContentError where a sample is lost or changed."""
    begun = Begun(case.samples)
    asked = job(case.workload, case.directory, case.workers, begun, case.sample_bytes)
    reader = Reader(case.batch_size)
    start = time.perf_counter()
    made = loader.make(asked)
    first, kept = _warm_up(made, reader, case.warm_ups)
    ahead_s = begun.work_s(case.warm_ups, case.costs_s)
    waits: list[float] = []
    gaps: list[float] = []
    cpu, clock = tree_cpu_s(), time.perf_counter()
    for _ in range(case.epochs):
        reader.begin_epoch()
        asking, batches = time.perf_counter(), iter(made)
        for number in range(case.batches):
            batch = next(batches)
            now = time.perf_counter()
            (waits if number else gaps).append(now - asking)
            reader.read(batch)
            rest = now + case.step_s - case.overshoot_s - time.perf_counter()
            if rest > 0:
                time.sleep(rest)
            asking = time.perf_counter()
        if next(batches, None) is not None:
            raise RuntimeError(f"{loader.name} delivered more than {case.batches} batches")
    elapsed, cpu = time.perf_counter() - clock, tree_cpu_s() - cpu
    left_s = begun.work_s(case.warm_ups + case.epochs, case.costs_s)
    del batch, batches
    reader.check(case.samples, case.warm_ups + case.epochs)
    loader.close(made)
    if not getattr(loader, "own_draws", False):
        _compare(kept, asked, allowed(asked, loader))
    count = case.samples * case.epochs
    p50, p95, p99 = np.percentile(waits, [50, 95, 99])
    return Run(
        samples_per_s=count / elapsed,
        efficiency=case.bound_s(ahead_s, left_s, in_order=loader.order == "in order") / elapsed,
        au=case.epochs * case.batches * case.step_s / elapsed,
        first_batch_s=first - start,
        epoch_gap_s=float(np.median(gaps)),
        wait_p50_s=float(p50),
        wait_p95_s=float(p95),
        wait_p99_s=float(p99),
        cpu_s_per_sample=cpu / count,
        lateness_max=float(reader.late),
        settings=", ".join(f"{key}={value}" for key, value in loader.settings(asked).items()),
    )


def watched(case: Case, loader: Loader) -> tuple[Run, int]:
    """As ``run``, with the process tree's proportional bytes at their peak. Watching takes time."""
    peak, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(_WATCH_S):
            peak[0] = max(peak[0], tree_pss_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        measured = run(case, loader)
    finally:
        stop.set()
        thread.join()
    return measured, peak[0]


def _warm_up(made: Iterable[Any], reader: Reader, epochs: int) -> tuple[float, list[Any]]:
    """Epochs without steps; the moment of the first batch, and copies of some batches.

    They are compared when all is over: a pause here would give those a start who go on with the next epoch.
    """
    first, kept = 0.0, []
    for epoch in range(epochs):
        reader.begin_epoch()
        for number, batch in enumerate(made):
            first = first or time.perf_counter()
            reader.read(batch)
            if number < _CHECKED and epoch == 0:
                kept.append(copy.deepcopy(batch))
    return first, kept


def _compare(batches: Iterable[Any], asked: Job, tolerance: Tolerance | None) -> None:
    source = Indexed(asked.source.dataset)  # does not count what is prepared for comparing
    alone = replace(asked, dataset=Prepared(source, asked.pipeline, asked.dataset.seed))
    for batch in batches:
        same_content(batch, alone, tolerance)


def allowed(asked: Job, loader: Loader) -> Tolerance | None:
    """How far a loader's samples may be from the CPU implementation's: not at all where that is what it runs."""
    if "device" not in getattr(loader, "lanes", ()):
        return None
    return whole_tolerance(asked.pipeline, "cpu", asked.pipeline.host_prefix)
