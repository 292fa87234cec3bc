"""One run of one loader with one step; each in a fresh process, which may meet CUDA as it likes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.session import steps
from benchmarks.session.loaders import Contender
from benchmarks.session.settings import Settings
from benchmarks.session.work import Taken, job

_LEAST = 3  # batches before and within what is timed
_WATCH_S = 5e-3
_left: list[Any] = []  # loaders that end with their process: SPDL's takes seconds to end by itself


@dataclass(frozen=True)
class Run:
    """What a run measured. ``step_s``: median step on the device while loading; ``resident_step_s``: on batches that
    lay there, before there was a loader (None: not measured); ``next_p50_s``, ``next_p99_s``: what ``next`` took of
    the training thread; ``stats``: the loader's own."""

    samples_per_s: float
    step_s: float
    resident_step_s: float | None
    next_p50_s: float
    next_p99_s: float
    batches: int
    device_bytes_peak: int | None = None
    stats: dict[str, Any] = field(default_factory=dict)


def begin(settings: Settings) -> None:
    """What every measuring process does first: the stand-ins share the cores with their own torch."""
    if settings.device == "cuda":
        torch.zeros(1, device="cuda").sum().item()
    else:
        torch.set_num_threads(1)


def run(settings: Settings, contender: Contender, which: str, step_name: str, timed_s: float) -> Run:
    """Measure; call it in a fresh process. Raises ContentError where a sample came twice, not at all, or changed."""
    begin(settings)
    step = steps.make(step_name, settings)
    resident_s = None if step_name == steps.EMPTY else resident_step_s(settings, step, settings.resident_s)
    return loaded(settings, contender, which, step, resident_s, timed_s)


def memory(settings: Settings, contender: Contender, which: str) -> Run:
    """The same without a step, with the device's memory watched."""
    begin(settings)
    step = steps.make(steps.EMPTY, settings)
    for batch, _ in zip(steps.resident(settings), range(2), strict=False):
        step(batch)  # the reader's own kernels and libraries are there before
    del batch
    steps.synchronise(settings.device)
    if settings.device == "cuda":
        torch.cuda.empty_cache()
    with _watched(_used_bytes(settings.device)) as peak:
        found = loaded(settings, contender, which, step, None, settings.timed_s)
    return replace(found, device_bytes_peak=peak[0])


def loaded(
    settings: Settings, contender: Contender, which: str, step: steps.Step, resident_s: float | None, timed_s: float
) -> Run:
    """Take the step on the loader's batches: first until it has settled, then for ``timed_s`` seconds."""
    asked = job(settings, which)
    made = contender.make(asked, settings.device)
    _left.append(made)
    batches, taken = iter(made), Taken()
    _for(settings.warm_s, batches, steps.Stopwatch(settings.device), step, taken)
    steps.synchronise(settings.device)
    watch = steps.Stopwatch(settings.device)
    clock = perf_counter()
    nexts, samples = _for(timed_s, batches, watch, step, taken)
    steps.synchronise(settings.device)
    elapsed = perf_counter() - clock
    stats = made.stats() if hasattr(made, "stats") else {}
    taken.check(
        asked,
        contender.tolerance(asked, settings.device),
        ordered=contender.ordered,
        own_draws=contender.own_draws,
    )
    p50, p99 = np.percentile(nexts, [50, 99])
    return Run(
        samples_per_s=samples / elapsed,
        step_s=float(np.median(watch.seconds())),
        resident_step_s=resident_s,
        next_p50_s=float(p50),
        next_p99_s=float(p99),
        batches=len(nexts),
        stats=stats,
    )


def resident_step_s(settings: Settings, step: steps.Step, seconds: float) -> float:
    """The median step on resident batches, once it has settled."""
    batches = steps.resident(settings)
    for _ in range(2):
        watch = steps.Stopwatch(settings.device)
        end = perf_counter() + seconds
        while perf_counter() < end or len(watch) < _LEAST:
            watch.time(step, next(batches))
    return float(np.median(watch.seconds()))


def _for(
    seconds: float, batches: Iterator[Any], watch: steps.Stopwatch, step: steps.Step, taken: Taken
) -> tuple[list[float], int]:
    """Take steps for so long, and no fewer than a few: what each ``next`` took, and the number of samples."""
    nexts: list[float] = []
    samples, end = 0, perf_counter() + seconds
    while perf_counter() < end or len(nexts) < _LEAST:
        asked = perf_counter()
        batch: Mapping[str, Any] | None = next(batches, None)
        nexts.append(perf_counter() - asked)
        if batch is None:
            raise RuntimeError("the loader came to its end: there are too few samples for this machine")
        watch.time(step, batch)
        taken.add(batch)
        samples += len(batch["label"])
    return nexts, samples


def _used_bytes(device: str) -> Callable[[], int]:
    """How to ask for the device's memory that is in use, by whoever; without one, for what this process holds."""

    def on_device() -> int:
        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    def here() -> int:
        return int(psutil.Process().memory_info().rss)

    return on_device if device == "cuda" else here


@contextmanager
def _watched(used: Callable[[], int]) -> Iterator[list[int]]:
    """The most bytes more than at the beginning, in a list of one."""
    before, peak, stop = used(), [0], threading.Event()

    def watch() -> None:
        while not stop.wait(_WATCH_S):
            peak[0] = max(peak[0], used() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
