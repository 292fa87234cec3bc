"""The parts that compare loaders: ``rates``, ``training``, ``memory``; and ``parity``.

Every run is in a process of its own, loaders take turns, and no run begins that would not end in time. A row is yielded
when it is known, and again when it is known better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from benchmarks.isolate import MeasurementError, excerpt
from benchmarks.peers.base import available
from benchmarks.report import progress
from benchmarks.session import loaders, measure, steps
from benchmarks.session.dali import Dali, DaliDynamic
from benchmarks.session.loaders import Contender, Ours, SpdlGpu, TorchGpu, TorchvisionGpu
from benchmarks.session.measure import Run, summary
from benchmarks.session.settings import NO_TIME, Request, Row, Settings
from minato_gpu.lab import parity
from minato_gpu.util.threads import usable_cores

DEVICE_BUDGET = 500_000_000
"""Bytes of the second run of ``memory``: three batches of 256 photographs; what DALI works with comes on top."""

MODULES = ("image_classification", "segmentation_3d", "object_detection", "speech_recognition")

_START_S = 60.0  # what a run may take beside what is timed
_USUAL_START_S = 6.0  # what it takes: a context, libraries, workers, graphs
_PARITY_S = 150.0


def peers(settings: Settings) -> list[Contender]:
    """The strongest is first: time may run short for the last."""
    cores = usable_cores()
    return [
        Dali("dali", cores),
        DaliDynamic("dali_dynamic", cores),
        TorchvisionGpu("torchvision", settings.workers, settings.size),
        TorchGpu("pytorch", settings.workers, settings.size),
        SpdlGpu("spdl", settings.workers, settings.size),
    ]


def rates(request: Request) -> Iterator[Row]:
    """No step: how fast each loader is."""
    return _compared(request, steps.EMPTY)


def training(request: Request) -> Iterator[Row]:
    """ResNet-50."""
    return _compared(request, steps.TRAINING)


def _compared(request: Request, step: str) -> Iterator[Row]:
    """This loader by its lanes beside its peers, in the order of what is most worth knowing: claims stand on the first
    four, and an interval on two repetitions."""
    cpu, device, hybrid = loaders.ours(request.settings.workers)
    best, *others = peers(request.settings)
    first, repetitions = [hybrid, best, cpu, device], request.settings.repetitions
    again = [[*first, *others]] * (repetitions - 2)
    return turns(request, [first, *([first] if repetitions > 1 else []), others, *again], step)


def memory(request: Request) -> Iterator[Row]:
    """The device's memory that a loader takes, its ready batches included, beyond what was in use without one."""
    hybrid, dali = loaders.ours(request.settings.workers)[2], peers(request.settings)[0]
    bounded = replace(hybrid, name="hybrid, budget", device_memory_budget=DEVICE_BUDGET)
    return turns(request, [[hybrid, bounded, dali]], steps.EMPTY)


def turns(request: Request, rounds: Sequence[Sequence[Contender]], step: str) -> Iterator[Row]:
    """Rows of contenders that take turns in rounds, while there is time for the longest run so far. One that fails
    before it has a figure is not run again."""
    runs: dict[str, list[Run]] = {each.name: [] for contenders in rounds for each in contenders}
    errors: dict[str, str] = {}
    longest = 0.0
    for each in [each for contenders in rounds for each in contenders]:
        settings, here = request.settings, runs[each.name]
        row: Row = {"name": each.name, "batch": settings.batch, "step": step, "loader_settings": each.settings()}
        if not available(each.package):  # not imported: a process that may fork must not have met CUDA
            yield {**row, "missing": f"{each.package} is not installed"}
        elif not here and each.name in errors:
            continue
        elif not request.time_for(max(longest, _usual_s(settings, each, step))):
            if not here:
                yield {**row, "missing": NO_TIME}
        else:
            began = perf_counter()
            try:
                here.append(request.isolated(_START_S + settings.timed_s, measure.run, settings, each, step))
                progress(f"{step}, {each.name}, {len(here)}: {here[-1].samples_per_s:.0f} samples/s")
            except MeasurementError as error:
                errors[each.name] = excerpt(str(error))
                progress(f"{step}, {each.name} failed:\n{error}")
            longest = max(longest, perf_counter() - began)
            failed = {"error": errors[each.name]} if each.name in errors else {}
            yield {**row, **summary(here), **failed}


def _usual_s(settings: Settings, contender: Contender, step: str) -> float:
    """What a run takes; a device lane may open sooner."""
    opens = isinstance(contender, Ours) and "device" in contender.lanes
    before = max(settings.warm_s, settings.opening_s if opens else 0.0)
    return _USUAL_START_S + before + settings.timed_s + (0.0 if step == steps.EMPTY else 2 * settings.resident_s)


def check(request: Request) -> Iterator[Row]:
    """Every stage of every pipeline, on its module's example data. One that cannot be checked hides no other."""
    for module in MODULES[: 1 if request.settings.quick else None]:
        if not request.known("parity", module):
            yield request.row(module, 5.0, _PARITY_S, _checked, module, request.settings.device)


def _checked(module: str, device: str) -> dict[str, Any]:
    found = parity.run_check(f"pipelines.{module}", None, device)
    failed = [row["stage"] for row in found.rows if not row["passed"]]
    return {"passed": found.passed, "stages_failed": failed, "rows": found.rows}
