"""A workload with what it costs by itself and the least time that a loader could take for it; loaders; a run of one."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate

from benchmarks.compare.dali import DaliReaders
from benchmarks.compare.workloads import Begun, Indexed, Prepared, Reader, job, leaves, same_content
from benchmarks.data.published import Array
from benchmarks.isolate import tree_cpu_s, tree_pss_bytes
from benchmarks.peers import Job, Loader
from benchmarks.peers.minato import Minato
from benchmarks.peers.pytorch import PyTorch
from benchmarks.peers.spdl import SpdlPool
from benchmarks.peers.torchdata import TorchdataNodes
from benchmarks.work import bound_s, first_batch_s
from minato_gpu import shared_empty
from minato_gpu.lab.parity import whole_tolerance
from minato_gpu.lanes.processes import keep_freed_memory
from minato_gpu.memory.arena import Arena
from minato_gpu.memory.worker_blocks import WorkerBlocks
from minato_gpu.pipeline.stages import Tolerance
from minato_gpu.util.threads import usable_cores


@dataclass(frozen=True)
class Case:
    """A workload's data with an emulated step of ``step_s``.

    ``load``: the samples' work takes so many times as long on all cores as the steps (0: there is no step).
    ``cpu_s``: CPU seconds that one process, alone, needs for an epoch. ``first_s``: the least time to the first batch
    in order; ``any_s``: to any batch. ``sample_bytes``: what a prepared sample takes, on average. ``costs_s``: of each
    sample alone.
    """

    workload: str
    directory: Path
    workers: int
    load: float
    samples: int
    batch_size: int
    cpu_s: float
    first_s: float
    any_s: float
    sample_bytes: int
    overshoot_s: float
    costs_s: Array
    step_s: float = 0.0

    @classmethod
    def measured(cls, workload: str, directory: Path, workers: int, overshoot_s: float) -> Case:
        """Measure what an epoch costs here; call it in a fresh process. There is no step."""
        asked = job(workload, directory, workers)
        alone = Alone.measured(asked)
        first, cheapest = (costs[: asked.batch_size] for costs in (alone.costs_s, np.sort(alone.costs_s)))
        return cls(
            workload,
            directory,
            workers,
            0.0,
            samples=len(alone.costs_s),
            batch_size=asked.batch_size,
            cpu_s=alone.cpu_s,
            first_s=first_batch_s(first, usable_cores()),
            any_s=first_batch_s(cheapest, usable_cores()),
            sample_bytes=alone.sample_bytes,
            overshoot_s=overshoot_s,
            costs_s=alone.costs_s,
        )

    @property
    def batches(self) -> int:
        """Batches of an epoch."""
        return -(-self.samples // self.batch_size)

    def with_step(self, load: float) -> Case:
        """The case with the step that makes this load."""
        step_s = self.cpu_s / usable_cores() / load / self.batches if load else 0.0
        return replace(self, load=load, step_s=step_s)

    def measured_again(self) -> Case:
        """The case with what an epoch costs now; call it in a fresh process."""
        now = Case.measured(self.workload, self.directory, self.workers, self.overshoot_s)
        return replace(self, cpu_s=now.cpu_s, first_s=now.first_s, any_s=now.any_s, costs_s=now.costs_s)

    def bound_s(self, ahead_s: float = 0.0, left_s: float = 0.0, *, in_order: bool) -> float:
        """The least time for the timed epoch (see ``work.bound_s``)."""
        first_s = self.first_s if in_order else self.any_s
        return bound_s(first_s, self.cpu_s, self.batches * self.step_s, usable_cores(), ahead_s, left_s)


@dataclass(frozen=True)
class Alone:
    """What one process needs for an epoch by itself, memory that it has freed being used again as workers here do.

    ``costs_s``: CPU seconds of each sample. ``cpu_s``: of all samples, joined to batches, and each batch read once.
    """

    costs_s: Array
    cpu_s: float
    sample_bytes: int

    @classmethod
    def measured(cls, asked: Job) -> Alone:
        torch.set_num_threads(1)
        keep_freed_memory()
        WorkerBlocks(0, Arena("alone")).serve()
        passes = [cls._one(asked) for _ in range(3)][1:]
        return min(passes, key=lambda each: each.cpu_s)

    @classmethod
    def _one(cls, asked: Job) -> Alone:
        reader, costs, nbytes = Reader(asked.batch_size), [], 0
        begin = time.process_time()
        for indices in asked.batches:
            samples = []
            for index in indices:
                before = time.process_time()
                samples.append(asked.dataset[index])
                costs.append(time.process_time() - before)
            nbytes += sum(leaf.nbytes for leaf in leaves(samples))
            reader.read(_stacked(samples) if asked.collate is default_collate else asked.join(samples))
        return cls(np.array(costs), time.process_time() - begin, nbytes // len(costs))


def _stacked(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """What ``default_collate`` makes of samples that are arrays, in memory that is used again."""
    batch = {}
    for name in samples[0]:
        rows = [np.asarray(sample[name]) for sample in samples]
        whole = shared_empty((len(rows), *rows[0].shape), torch.from_numpy(np.empty(0, rows[0].dtype)).dtype)
        np.stack(rows, out=whole.numpy())
        batch[name] = whole
    return batch


# --- a run of one loader ----------------------------------------------------------------------------------------------


_CHECKED = 3  # batches whose content is compared
_WATCH_S = 0.02


class Run(NamedTuple):
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
    """Measure one loader; call it in a fresh process. Raises ContentError where a sample is lost or changed.

    An epoch without steps goes before the timed one: loaders that go on with the next epoch before one has ended should
    begin with as much in hand as they will leave.
    """
    begun = Begun(case.samples)
    asked = job(case.workload, case.directory, case.workers, begun, case.sample_bytes)
    reader = Reader(case.batch_size)
    start = time.perf_counter()
    made = loader.make(asked)
    first, kept = _warm_up(made, reader)
    ahead_s = begun.work_s(1, case.costs_s)
    waits: list[float] = []
    reader.begin_epoch()
    cpu, clock = tree_cpu_s(), time.perf_counter()
    asking, batches = clock, iter(made)
    for _ in range(case.batches):
        batch = next(batches)
        now = time.perf_counter()
        waits.append(now - asking)
        reader.read(batch)
        rest = now + case.step_s - case.overshoot_s - time.perf_counter()
        if rest > 0:
            time.sleep(rest)
        asking = time.perf_counter()
    if next(batches, None) is not None:
        raise RuntimeError(f"{loader.name} delivered more than {case.batches} batches")
    elapsed, cpu = time.perf_counter() - clock, tree_cpu_s() - cpu
    left_s = begun.work_s(2, case.costs_s)
    reader.check(case.samples, epochs=2)
    if not loader.own_draws:
        compare_content(kept, asked, allowed(asked, loader))
    p50, p95, p99 = np.percentile(waits[1:], [50, 95, 99])
    return Run(
        samples_per_s=case.samples / elapsed,
        efficiency=case.bound_s(ahead_s, left_s, in_order=loader.in_order) / elapsed,
        au=case.batches * case.step_s / elapsed,
        first_batch_s=first - start,
        epoch_gap_s=waits[0],
        wait_p50_s=float(p50),
        wait_p95_s=float(p95),
        wait_p99_s=float(p99),
        cpu_s_per_sample=cpu / case.samples,
        lateness_max=float(reader.late),
        settings=loader.described(asked),
    )


def peak_pss_bytes(case: Case, loader: Loader) -> int:
    """The process tree's proportional bytes at their peak in a run, whose figures do not count: watching takes time."""
    peak, stop = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(_WATCH_S):
            peak = max(peak, tree_pss_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        run(case, loader)
    finally:
        stop.set()
        thread.join()
    return peak


def _warm_up(made: Iterable[Any], reader: Reader) -> tuple[float, list[Any]]:
    """An epoch without steps; the moment of the first batch, and copies of some batches.

    They are compared when all is over: a pause here would give those a start who go on with the next epoch.
    """
    first, kept = 0.0, list[Any]()
    reader.begin_epoch()
    for batch in made:
        first = first or time.perf_counter()
        reader.read(batch)
        if len(kept) < _CHECKED:
            kept.append(copy.deepcopy(batch))
    return first, kept


def compare_content(batches: Iterable[Any], asked: Job, tolerance: Tolerance | None) -> None:
    """Compare batches of a pipeline's samples with what one process prepares. Raises ContentError."""
    source = Indexed(asked.source.dataset)  # does not count what is prepared for comparing
    alone = replace(asked, dataset=Prepared(source, asked.pipeline, asked.dataset.seed))
    for batch in batches:
        same_content(batch, alone, tolerance)


def allowed(asked: Job, loader: Loader) -> Tolerance | None:
    """How far a loader's samples may be from the CPU implementation's: not at all where that is what it runs."""
    if "device" not in getattr(loader, "lanes", ()):
        return None
    return whole_tolerance(asked.pipeline, "cpu", asked.pipeline.host_prefix)


# --- loaders, and the settings that are tried for each before its figures count ---------------------------------------


CANDIDATES: Mapping[str, Sequence[Loader]] = {
    "pytorch in order": [PyTorch("pytorch in order", prefetch_factor=factor) for factor in (2, 4, 8)],
    "pytorch out of order": [
        PyTorch("pytorch out of order", in_order=False, prefetch_factor=factor) for factor in (2, 4, 8)
    ],
    "torchdata in order": [
        TorchdataNodes("torchdata in order", processes=processes, in_order=True, prefetch=prefetch)
        for processes in (True, False)
        for prefetch in (2, 4)
    ],
    "torchdata out of order": [
        TorchdataNodes("torchdata out of order", processes=processes, prefetch=prefetch)
        for processes in (True, False)
        for prefetch in (2, 4)
    ],
    "spdl in order": [
        SpdlPool("spdl in order", processes=processes, in_order=True, concurrency=concurrency)
        for processes in (True, False)
        for concurrency in (None, 8, 32)
    ],
    "spdl out of order": [
        SpdlPool("spdl out of order", processes=processes, concurrency=concurrency)
        for processes in (True, False)
        for concurrency in (None, 8)
    ],
    "dali readers": [DaliReaders("dali readers", prefetch=prefetch) for prefetch in (1, 2, 3)],
    "minato_gpu in order": [Minato("minato_gpu in order")],
    "minato_gpu bounded": [Minato("minato_gpu bounded", in_order=False)],
    "minato_gpu pipeline, cpu": [Minato("minato_gpu pipeline, cpu", lanes=("cpu",))],
    "minato_gpu pipeline, device": [Minato("minato_gpu pipeline, device", lanes=("device",))],
    "minato_gpu pipeline, hybrid": [Minato("minato_gpu pipeline, hybrid", lanes=("cpu", "device"))],
    "minato_gpu pipeline, hybrid bounded": [
        Minato("minato_gpu pipeline, hybrid bounded", in_order=False, lanes=("cpu", "device"))
    ],
}
"""Loaders by name; the fastest candidate without a step is the one that is compared."""
