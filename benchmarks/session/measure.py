"""One run of one loader with one step, in a fresh process which may meet CUDA as it likes; and a row from its runs."""

from __future__ import annotations

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
from benchmarks.session.settings import Row, Settings
from benchmarks.session.work import Content, Taken, job
from minato_gpu.device.nvml import handle_of, library

MOST_REPEATED = 0.01  # of the samples: beyond, the figure is that of the CPU's implementations
AT_WORK = 8  # micro-batches that a device lane has finished when the clock begins
ENOUGH_BATCHES = 3  # fewer of a run are no rate: what was prepared before the clock began counts for too much
_left: list[Any] = []  # loaders that end with their process: SPDL's takes seconds to end by itself


class SubstituteError(RuntimeError):
    """What was measured is not what its name says."""


@dataclass(frozen=True)
class Run:
    """What a run measured."""

    samples: int
    seconds: float
    cpu_s: float  # of all processes
    steps_s: Sequence[float]  # each step on the device while loading
    nexts_s: Sequence[float]  # what each ``next`` took of the training thread
    resident_steps_s: Sequence[float] = ()  # on batches that were there before there was a loader; empty: not measured
    made: Mapping[str, int] = field(default_factory=dict)  # samples that lanes have finished meanwhile, by lane
    repeated: int = 0  # of those prepared twice
    content: Content = field(default_factory=Content)
    watched: Mapping[str, float] = field(default_factory=dict)  # see Readings.row
    stats: Mapping[str, Any] = field(default_factory=dict)  # the loader's own
    rough: str | None = None  # why the rate is not to be trusted

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


def run(settings: Settings, contender: Contender, step_name: str) -> Run:
    """Measure; call it in a fresh process. Raises ContentError where a sample came twice, not at all, or as another;
    SubstituteError where the figure would not be that of the contender."""
    begin(settings)
    step = steps.make(step_name, settings)
    resident = resident_steps_s(settings, step)
    if step_name == steps.EMPTY:
        return loaded(settings, contender, step)
    return replace(loaded(settings, contender, step), resident_steps_s=resident)


def resident_steps_s(settings: Settings, step: steps.Step) -> list[float]:
    """Steps on resident batches, once they have settled. Their memory is given back."""
    batches = steps.resident(settings)
    for _ in range(2):
        watch = steps.Stopwatch(settings.device)
        end = perf_counter() + settings.resident_s * (step.name != steps.EMPTY)
        while perf_counter() < end or len(watch) < 3:
            watch.time(step, next(batches))
    found = watch.seconds()
    del batches
    if settings.device == "cuda":
        torch.cuda.empty_cache()
    return found


def loaded(settings: Settings, contender: Contender, step: steps.Step) -> Run:
    """Take the step on the loader's batches: for ``warm_s`` from the first one on, then for ``timed_s`` seconds.

    In between it is taken until a device lane of ours is at work, up to ``opening_s`` from the first batch on. Each of
    these may take a batch longer, and no more: a slow loader takes no time of others.
    A device lane must have made some of them where nothing but the loader takes time: beside steps the loader may spare
    the device.
    """
    has_device = isinstance(contender, Ours) and "device" in contender.lanes
    asked = job(settings, fancy_upsampling=contender.fancy_upsampling)
    with watched(settings.device) as readings:
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
        readings.busy.clear()
        clock = perf_counter()
        nexts, samples = _for(settings.timed_s, batches, watch, step, taken)
        steps.synchronise(settings.device)
        elapsed, cpu_s = perf_counter() - clock, tree_cpu_s() - cpu_s
        stats, row = _stats(made), readings.row()
    found = Run(
        samples=samples,
        seconds=elapsed,
        cpu_s=cpu_s,
        steps_s=watch.seconds(),
        nexts_s=nexts,
        made={name: int(lane["samples"]) - _lane(before, name) for name, lane in stats.get("lanes", {}).items()},
        repeated=int(stats.get("samples_repeated", 0)) - int(before.get("samples_repeated", 0)),
        watched=row,
        stats=stats,
        rough="the device lane was still opening" if has_device and not at_work(before) else None,
    )
    must_share = has_device and step.name == steps.EMPTY and not settings.quick
    refuse_substitutes(found, wants_device=must_share)
    tolerance = contender.tolerance(asked, settings.device)
    content = taken.check(asked, tolerance, ordered=contender.ordered, own_draws=contender.own_draws)
    return replace(found, content=content)


def refuse_substitutes(found: Run, *, wants_device: bool) -> None:
    """Raises SubstituteError where the CPU's implementations have stood in for the device, whatever came.

    ``wants_device``: a device lane is there, and nothing takes as long as preparing samples.
    """
    if any(lane.get("retired") for lane in _each(found.stats, "device_lane")):
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
    """Returns whether device lanes have finished ``AT_WORK`` micro-batches each, on average, or get nothing to do."""
    lanes = _each(stats, "device_lane")
    made = sum(_lane(stats, name) for name in stats.get("lanes", {}) if name.startswith("device"))
    idle = any(lane["spared"] or lane["retired"] for lane in lanes)
    return idle or made >= AT_WORK * sum(lane["micro_batch"] for lane in lanes)


def _each(stats: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """What stats say of one device, or of each of several."""
    found = stats.get(name) or []
    return [found] if isinstance(found, Mapping) else list(found)


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


# --- a row of figures from the runs of one loader ---------------------------------------------------------------------


def summary(runs: Sequence[Run]) -> Row:
    """Medians and spread over the runs; ``samples_per_s_each`` and ``cores_busy_each`` by run, for pairing; percentiles
    of all steps together. Empty where there is no run. ``rough`` says why a rate is not to be trusted."""
    if not runs:
        return {}
    row: Row = {
        "repetitions": len(runs),
        **report.summarise("samples_per_s", [each.samples_per_s for each in runs]),
        "samples_per_s_each": [each.samples_per_s for each in runs],
        "cpu_s_per_sample": report.median([each.cpu_s / each.samples for each in runs]),
        "cores_busy": report.median([each.cpu_s / each.seconds for each in runs]),
        "cores_busy_each": [each.cpu_s / each.seconds for each in runs],
        **report.summarise("step", [each.step_s for each in runs], "_s"),
        **_tail("step", [step for each in runs for step in each.steps_s]),
        **_tail("next", [took for each in runs for took in each.nexts_s]),
        "batches": sum(len(each.nexts_s) for each in runs),
        "repeated_share": sum(each.repeated for each in runs) / sum(each.samples for each in runs),
        "stats": runs[-1].stats,
    }
    fewest = min(len(each.nexts_s) for each in runs)
    few = [f"only {fewest} timed batches in a run"] if fewest < ENOUGH_BATCHES else []
    if why := [*few, *dict.fromkeys(each.rough for each in runs if each.rough is not None)]:
        row["rough"] = "; ".join(why)
    return row | _resident(runs) | _device(runs) | _content(runs)


def _resident(runs: Sequence[Run]) -> Row:
    """What steps took without a loader, and by how much they are slower beside it."""
    pairs = [(each.step_s, float(np.median(each.resident_steps_s))) for each in runs if len(each.resident_steps_s)]
    if not pairs:
        return {}
    return {
        **report.summarise("resident_step", [resident for _, resident in pairs], "_s"),
        **_tail("resident_step", [step for each in runs for step in each.resident_steps_s]),
        **report.summarise("step_slowdown", [loading / resident - 1 for loading, resident in pairs]),
    }


def _device(runs: Sequence[Run]) -> Row:
    """What was made there, and what was seen there meanwhile."""
    row: Row = {}
    shares = [each.device_share for each in runs if each.device_share is not None]
    if shares:
        row["device_share"] = report.median(shares)
    for name in dict.fromkeys(name for each in runs for name in each.watched):
        row[name] = report.median([each.watched[name] for each in runs if name in each.watched])
    return row


def _content(runs: Sequence[Run]) -> Row:
    """How far pictures were off, the worst of all runs; nothing for loaders that draw by themselves."""
    found = [each.content for each in runs if each.content.max_levels is not None]
    if not found:
        return {}
    return {
        "max_levels": max(each.max_levels or 0.0 for each in found),
        "mean_levels": max(each.mean_levels or 0.0 for each in found),
        "content_ok": all(each.content_ok for each in found),
    }


def _tail(name: str, values: Sequence[float]) -> dict[str, float]:
    """The median and the 99th percentile of seconds."""
    p50, p99 = np.percentile(np.asarray(values), (50, 99))
    return {f"{name}_p50_s": float(p50), f"{name}_p99_s": float(p99)}


# --- what the device does meanwhile -----------------------------------------------------------------------------------


_PERIOD_S = 0.05


@dataclass
class Readings:
    """Of everybody's work on the device."""

    busy: list[tuple[float, float]] = field(default_factory=list)  # shares of time, 0 to 1: the GPU, its JPEG engine
    peak: int = 0  # most bytes of its memory in use, beyond those in use before

    def row(self) -> dict[str, float]:
        found: dict[str, float] = {"device_bytes_peak": self.peak}
        if self.busy:
            gpu, jpeg = np.mean(self.busy, axis=0)
            found |= {"gpu_busy": float(gpu), "jpeg_engine_busy": float(jpeg)}
        return found


@contextmanager
def watched(device: str) -> Iterator[Readings]:
    """Reads the device's memory, and NVML where it is there, until the end of the context."""
    readings, stop = Readings(), threading.Event()
    shares, before = _shares(readings) if device == "cuda" else None, _used_bytes(device)

    def watch() -> None:
        while not stop.wait(_PERIOD_S):
            readings.peak = max(readings.peak, _used_bytes(device) - before)
            if shares is not None:
                shares()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield readings
    finally:
        stop.set()
        thread.join()


def _used_bytes(device: str) -> int:
    """The device's memory that is in use, by whoever; without one, what this process holds."""
    if device != "cuda":
        return int(psutil.Process().memory_info().rss)
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def _shares(readings: Readings) -> Callable[[], None] | None:
    """A function that takes one reading of the current device; None where NVML is not there, or does not know it."""
    nvml: Any = library()
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
        handle = handle_of(nvml, str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
    except nvml.NVMLError:
        return None

    def read() -> None:
        with suppress(nvml.NVMLError):
            gpu, jpeg = nvml.nvmlDeviceGetUtilizationRates(handle).gpu, nvml.nvmlDeviceGetJpgUtilization(handle)[0]
            readings.busy.append((gpu / 100, jpeg / 100))

    return read
