"""One run of one loader with one step, in a fresh process which may meet CUDA as it likes; and a row from its runs.

While it runs, NVML is read ten times a second."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks import report
from benchmarks.isolate import tree_cpu_s
from benchmarks.session import steps
from benchmarks.session.loaders import Contender, Ours
from benchmarks.session.settings import Settings
from benchmarks.session.work import Content, Taken, job
from minato_gpu.device.nvml import handle_of, library

_WATCH_S = 5e-3
MOST_REPEATED = 0.01  # of the samples: beyond, the figure is that of the CPU's implementations
AT_WORK = 8  # micro-batches that a device lane has finished when the clock begins
_left: list[Any] = []  # loaders that end with their process: SPDL's takes seconds to end by itself


class SubstituteError(RuntimeError):
    """What was measured is not what its name says."""


@dataclass(frozen=True)
class Run:
    """What a run measured. ``steps_s``: each step on the device while loading; ``resident_steps_s``: on batches that
    lay there, before there was a loader (empty: not measured); ``nexts_s``: what each ``next`` took of the training
    thread; ``cpu_s``: CPU seconds of all processes; ``made``: samples that lanes have finished meanwhile, by lane;
    ``repeated``: of those prepared twice; ``watched``: see ``Readings.row``; ``stats``: the loader's own.
    ``rough``: why the rate is not to be trusted, or None."""

    samples: int
    seconds: float
    cpu_s: float
    steps_s: Sequence[float]
    nexts_s: Sequence[float]
    resident_steps_s: Sequence[float] = ()
    made: Mapping[str, int] = field(default_factory=dict)
    repeated: int = 0
    content: Content = field(default_factory=Content)
    watched: Mapping[str, float] = field(default_factory=dict)
    device_bytes_peak: int | None = None
    stats: Mapping[str, Any] = field(default_factory=dict)
    rough: str | None = None

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds

    @property
    def step_s(self) -> float:
        return float(np.median(self.steps_s))

    @property
    def device_share(self) -> float | None:
        """The share of the samples that device lanes made; None for loaders without lanes."""
        total = sum(self.made.values())
        return sum(n for name, n in self.made.items() if name.startswith("device")) / total if total else None


def begin(settings: Settings) -> None:
    """What every measuring process does first: the stand-ins share the cores with their own torch."""
    if settings.device == "cuda":
        torch.zeros(1, device="cuda").sum().item()
    else:
        torch.set_num_threads(1)


def run(settings: Settings, contender: Contender, which: str, step_name: str, timed_s: float) -> Run:
    """Measure; call it in a fresh process. Raises ContentError where a sample came twice, not at all, or as another;
    SubstituteError where the figure would not be that of the contender."""
    if settings.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: settings.cores])
    begin(settings)
    step = steps.make(step_name, settings)
    resident = [] if step_name == steps.EMPTY else resident_steps_s(settings, step, settings.resident_s)
    return replace(loaded(settings, contender, which, step, timed_s), resident_steps_s=resident)


def memory(settings: Settings, contender: Contender, which: str) -> Run:
    """A run without a step, with the device's memory watched."""
    begin(settings)
    step = steps.make(steps.EMPTY, settings)
    for batch, _ in zip(steps.resident(settings), range(2), strict=False):
        step(batch)  # the reader's own kernels and libraries are there before
    del batch
    steps.synchronise(settings.device)
    if settings.device == "cuda":
        torch.cuda.empty_cache()
    with _watched(_used_bytes(settings.device)) as peak:
        found = loaded(settings, contender, which, step, settings.timed_s)
    return replace(found, device_bytes_peak=peak[0])


def loaded(settings: Settings, contender: Contender, which: str, step: steps.Step, timed_s: float) -> Run:
    """Take the step on the loader's batches: for ``warm_s`` from the first one on, then for ``timed_s`` seconds.

    In between it is taken until a device lane of ours is at work, up to ``opening_s`` from the first batch on. Each of
    these may take a batch longer, and no more: a slow loader takes no time of others.
    A device lane must have made some of them where nothing but the loader takes time: beside steps the loader may spare
    the device.
    """
    has_device = isinstance(contender, Ours) and "device" in contender.lanes
    wants_device = has_device and isinstance(step, steps.Reading)
    asked = job(settings, which, fancy_upsampling=not isinstance(contender, Ours) or contender.fancy_upsampling)
    made = contender.make(asked, settings.device)
    _left.append(made)
    batches, taken, warming = iter(made), Taken(), steps.Stopwatch(settings.device)
    _for(0.0, batches, warming, step, taken)
    opening = perf_counter() + settings.opening_s
    _for(settings.warm_s, batches, warming, step, taken)
    while has_device and not at_work(_stats(made)) and perf_counter() < opening:
        _for(0.0, batches, warming, step, taken)
    steps.synchronise(settings.device)
    watch, before, cpu_s = steps.Stopwatch(settings.device), _stats(made), tree_cpu_s()
    with watched_gpu(settings.device) as readings:
        clock = perf_counter()
        nexts, samples = _for(timed_s, batches, watch, step, taken)
        steps.synchronise(settings.device)
        elapsed = perf_counter() - clock
    cpu_s, stats = tree_cpu_s() - cpu_s, _stats(made)
    found = Run(
        samples=samples,
        seconds=elapsed,
        cpu_s=cpu_s,
        steps_s=watch.seconds(),
        nexts_s=nexts,
        made={name: int(lane["samples"]) - _lane(before, name) for name, lane in stats.get("lanes", {}).items()},
        repeated=int(stats.get("samples_repeated", 0)) - int(before.get("samples_repeated", 0)),
        watched=readings.row(),
        stats=stats,
        rough="the device lane was still opening" if has_device and not at_work(before) else None,
    )
    refuse_substitutes(found, wants_device=wants_device and not settings.quick)
    content = taken.check(
        asked,
        contender.tolerance(asked, settings.device),
        ordered=contender.ordered,
        own_draws=contender.own_draws,
    )
    return replace(found, content=content)


def refuse_substitutes(found: Run, *, wants_device: bool) -> None:
    """Raises SubstituteError where the CPU's implementations have stood in for the device, whatever came.

    ``wants_device``: a device lane is there, and nothing takes as long as preparing samples.
    """
    for lane in _each(found.stats, "device_lane"):
        if lane.get("retired"):
            raise SubstituteError("the device lane has retired; the log says why")
    for device in _each(found.stats, "device"):
        if device.get("pinning_refused"):
            raise SubstituteError(f"pinning of host memory was refused: {device['pinning_refused']}")
    made = sum(found.made.values())
    if found.repeated > MOST_REPEATED * max(1, made):
        raise SubstituteError(f"{found.repeated} of {made} samples were prepared again by the CPU's implementations")
    if wants_device and not found.device_share:
        raise SubstituteError(f"the device lane made none of {made} samples")


def at_work(stats: Mapping[str, Any]) -> bool:
    """Whether device lanes have finished ``AT_WORK`` micro-batches each, on average, or will get nothing to do."""
    lanes = _each(stats, "device_lane")
    made = sum(_lane(stats, name) for name in stats.get("lanes", {}) if name.startswith("device"))
    idle = any(lane["spared"] or lane["retired"] for lane in lanes)
    return idle or made >= AT_WORK * sum(lane["micro_batch"] for lane in lanes)


def _each(stats: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """What stats say of one device, or of each of several."""
    found = stats.get(name) or []
    return [found] if isinstance(found, Mapping) else list(found)


def resident_steps_s(settings: Settings, step: steps.Step, seconds: float) -> list[float]:
    """Steps on resident batches, once they have settled."""
    batches = steps.resident(settings)
    for _ in range(2):
        watch = steps.Stopwatch(settings.device)
        end = perf_counter() + seconds
        while perf_counter() < end or len(watch) < 3:
            watch.time(step, next(batches))
    return watch.seconds()


def _stats(loader: Any) -> dict[str, Any]:
    return loader.stats() if hasattr(loader, "stats") else {}


def _lane(stats: Mapping[str, Any], name: str) -> int:
    return int(stats.get("lanes", {}).get(name, {}).get("samples", 0))


def _for(
    seconds: float, batches: Iterator[Any], watch: steps.Stopwatch, step: steps.Step, taken: Taken
) -> tuple[list[float], int]:
    """Take steps for so long, and at least one: what each ``next`` took, and how many samples."""
    nexts: list[float] = []
    samples, end = 0, perf_counter() + seconds
    while not nexts or perf_counter() < end:
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


# --- a row of figures from the runs of one loader ---------------------------------------------------------------------


ENOUGH_BATCHES = 3
"""Fewer batches of a run are no rate: what was prepared before the clock began counts for too much."""


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Medians and spread over the runs; ``samples_per_s_each``, ``cores_busy_each`` and ``step_slowdown_each`` by run,
    for pairing; percentiles of all steps together. Empty where there is no run. ``rough`` says why a rate is not to be
    trusted."""
    if not runs:
        return {}
    row: dict[str, Any] = {
        "repetitions": len(runs),
        **report.summarise("samples_per_s", [each.samples_per_s for each in runs]),
        "samples_per_s_each": [each.samples_per_s for each in runs],
        "cpu_s_per_sample": _median(runs, lambda each: each.cpu_s / each.samples),
        "cores_busy": _median(runs, lambda each: each.cpu_s / each.seconds),
        "cores_busy_each": [each.cpu_s / each.seconds for each in runs],
        **report.summarise("step", [each.step_s for each in runs], "_s"),
        **tail("step", [step for each in runs for step in each.steps_s]),
        **tail("next", [took for each in runs for took in each.nexts_s]),
        "batches": sum(len(each.nexts_s) for each in runs),
        "repeated_share": sum(each.repeated for each in runs) / sum(each.samples for each in runs),
        "stats": runs[-1].stats,
    }
    return row | _rough(runs) | _resident(runs) | _device(runs) | _content(runs)


def _rough(runs: Sequence[Run]) -> dict[str, str]:
    """Why the rate of a run says little: it had few batches, or was not what it is later."""
    fewest = min(len(each.nexts_s) for each in runs)
    few = [f"only {fewest} timed batches in a run"] if fewest < ENOUGH_BATCHES else []
    why = [*few, *dict.fromkeys(each.rough for each in runs if each.rough is not None)]
    return {"rough": "; ".join(why)} if why else {}


def _resident(runs: Sequence[Run]) -> dict[str, Any]:
    """What steps took without a loader, and by how much they are slower beside it."""
    pairs = [(each.step_s, float(np.median(each.resident_steps_s))) for each in runs if len(each.resident_steps_s)]
    if not pairs:
        return {}
    slowdowns = [loading / resident - 1 for loading, resident in pairs]
    return {
        **report.summarise("resident_step", [resident for _, resident in pairs], "_s"),
        **tail("resident_step", [step for each in runs for step in each.resident_steps_s]),
        **report.summarise("step_slowdown", slowdowns),
        "step_slowdown_each": slowdowns,
    }


def _device(runs: Sequence[Run]) -> dict[str, Any]:
    """What was made there, and what NVML has seen."""
    row: dict[str, Any] = {}
    shares = [each.device_share for each in runs if each.device_share is not None]
    if shares:
        row["device_share"] = report.median(shares)
    for name in dict.fromkeys(name for each in runs for name in each.watched):
        row[name] = report.median([each.watched[name] for each in runs if name in each.watched])
    peaks = [each.device_bytes_peak for each in runs if each.device_bytes_peak is not None]
    if peaks:
        row["device_bytes_peak"] = max(peaks)
    learned = runs[-1].stats.get("device_lane", {})
    if "step_s_per_work_s" in learned:
        row |= {"learned_step_s_per_device_s": learned["step_s_per_work_s"], "device_spared": learned["spared"]}
    return row


def _content(runs: Sequence[Run]) -> dict[str, Any]:
    """How far pictures were off, the worst of all runs; nothing for loaders that draw by themselves."""
    found = [each.content for each in runs if each.content.max_levels is not None]
    if not found:
        return {}
    return {
        "max_levels": max(each.max_levels or 0.0 for each in found),
        "mean_levels": max(each.mean_levels or 0.0 for each in found),
        "content_ok": all(each.content_ok for each in found),
    }


def _median(runs: Sequence[Run], figure: Callable[[Run], float]) -> float:
    return report.median([figure(each) for each in runs])


def tail(name: str, values: Sequence[float], percentiles: Sequence[float] = (50, 99)) -> dict[str, float]:
    """Percentiles of seconds: ``NAME_p50_s``, ``NAME_p99_s``, and ``NAME_p999_s`` for 99.9."""
    found = np.percentile(np.asarray(values), percentiles)
    return {f"{name}_p{f'{p:g}'.replace('.', '')}_s": float(value) for p, value in zip(percentiles, found, strict=True)}


# --- what the device does meanwhile -----------------------------------------------------------------------------------


_PERIOD_S = 0.1


@dataclass
class Readings:
    """Of everybody's work on the device. ``gpu``, ``jpeg``: shares of time, 0 to 1, that it and its JPEG engine were
    busy; ``nbytes``: of its memory in use."""

    gpu: list[float] = field(default_factory=list)
    jpeg: list[float] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        """``gpu_busy``, ``jpeg_engine_busy`` (means) and ``gpu_bytes`` (the most), as far as NVML tells them."""
        found: dict[str, float] = {}
        if self.gpu:
            found["gpu_busy"] = float(np.mean(self.gpu))
        if self.jpeg:
            found["jpeg_engine_busy"] = float(np.mean(self.jpeg))
        if self.nbytes:
            found["gpu_bytes"] = max(self.nbytes)
        return found


@contextmanager
def watched_gpu(device: str) -> Iterator[Readings]:
    """Reads NVML until the end of the context; nothing where there is no GPU or no NVML."""
    readings = Readings()
    read = _reader(readings) if device == "cuda" else None
    if read is None:
        yield readings
        return
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(_PERIOD_S):
            read()

    thread = threading.Thread(target=watch, name="nvml")
    thread.start()
    try:
        yield readings
    finally:
        stop.set()
        thread.join()


def _reader(readings: Readings) -> Callable[[], None] | None:
    """A function that takes one reading of the current device; None where NVML is not there, or does not know it."""
    nvml: Any = library()
    if nvml is None:
        return None
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    try:
        nvml.nvmlInit()
        handle = handle_of(nvml, uuid)
    except nvml.NVMLError:
        return None

    def read() -> None:
        with suppress(nvml.NVMLError):
            readings.nbytes.append(int(nvml.nvmlDeviceGetMemoryInfo(handle).used))
            readings.gpu.append(nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
            readings.jpeg.append(nvml.nvmlDeviceGetJpgUtilization(handle)[0] / 100)

    return read
