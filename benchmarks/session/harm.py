"""What the device lane does to training: ``price``, and what the loader does to the training thread: ``thread``."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.session import measure, steps
from benchmarks.session.loaders import Ours
from benchmarks.session.measure import tail
from benchmarks.session.parts import chosen_ours
from benchmarks.session.questions import made_by_device
from benchmarks.session.record import Row, Rows
from benchmarks.session.settings import Request, Settings
from benchmarks.session.work import MIXED, SMALL, job

_PERCENTILES = (50, 99, 99.9)
EVERY = (0, 8, 4, 2, 1)
"""Of so many steps one takes a batch that the device lane has prepared; 0: none."""


def price(request: Request) -> Iterator[Row]:
    """ResNet-50 on resident batches while the device lane works so much: its share of the time, and the step.

    The last row's ``step_s_per_device_s`` is the slope of the least-squares line through (seconds of device work for
    each step, seconds of the step): what the loader learns while running, here known from the whole range.
    """
    limit = request.limit_s(600.0)
    points = request.isolated(limit, _priced, request.settings, chosen_ours(request)[1], 0.9 * limit)
    yield from priced_rows(points)


def priced_rows(points: list[dict[str, float]]) -> Rows:
    """Rows from points {"every", "device_busy", "device_s_per_step", "step_s"}, of which some have every = 0."""
    alone = report.median([point["step_s"] for point in points if not point["every"]])
    rows: Rows = []
    for every in dict.fromkeys(int(point["every"]) for point in points):
        here = [point for point in points if point["every"] == every]
        row: dict[str, Any] = {"name": f"a batch for every {every} steps" if every else "no device work"}
        for name, unit in (("device_busy", ""), ("device_s_per_step", ""), ("step", "_s")):
            row |= report.summarise(name, [point[f"{name}{unit}"] for point in here], unit)
        rows.append({**row, "repetitions": len(here), "step_slowdown": row["step_s"] / alone - 1})
    work = np.array([point["device_s_per_step"] for point in points])
    took = np.array([point["step_s"] for point in points])
    spread = float(((work - work.mean()) ** 2).sum())
    slope = float(((work - work.mean()) * (took - took.mean())).sum()) / spread if spread else None
    return [*rows, {"name": "slope", "step_s_per_device_s": slope}]


def _priced(settings: Settings, contender: Ours, limit_s: float) -> list[dict[str, float]]:
    """The points; after the first round only while there is time for another."""
    begun = perf_counter()
    measure.begin(settings)
    step = steps.make(steps.TRAINING, settings)
    resident = steps.resident(settings)
    loader = contender.make(job(settings, MIXED), settings.device)
    batches = iter(loader)
    next(batches)
    points = []
    for number in range(min(2, settings.repetitions)):
        if number and perf_counter() - begun > 0.5 * limit_s:
            break
        for every in EVERY:
            for timed in (False, True):  # first what was prepared ahead is taken, or the lane comes to rest
                watch = steps.Stopwatch(settings.device)
                began, worked = perf_counter(), _device_s(loader)
                end = began + settings.timed_s / (1 if timed else 2)
                while perf_counter() < end or len(watch) < 3 * max(1, every):
                    if every and len(watch) % every == 0:
                        next(batches)
                    watch.time(step, next(resident))
                steps.synchronise(settings.device)
            elapsed, worked = perf_counter() - began, _device_s(loader) - worked
            took = watch.seconds()[1:]  # the first may have waited for the host
            points.append(
                {
                    "every": float(every),
                    "device_busy": worked / elapsed,
                    "device_s_per_step": worked / len(watch),
                    "step_s": float(np.mean(took)),  # the median would not see that every eighth is longer
                }
            )
    made_by_device(loader)
    return points


def _device_s(loader: Any) -> float:
    """Seconds that the device lane has worked in this epoch."""
    stats = loader.stats()
    lane = stats["lanes"].get("device")
    return 0.0 if lane is None else float(lane["busy_share"] * stats["elapsed_s"] * max(lane["slots"], 1))


# --- the training thread -----------------------------------------------------------------------------------------


def thread(request: Request) -> Iterator[Row]:
    """What ``next`` takes of the training thread when its batch lies ready, and for how long the interpreter is taken
    from it while it computes (the longest gap of a loop that reads the clock, also without a loader)."""
    limit = request.limit_s(600.0)
    yield from request.isolated(limit, _thread, request.settings, chosen_ours(request)[2], 0.8 * limit)


def _thread(settings: Settings, contender: Ours, limit_s: float) -> Rows:
    measure.begin(settings)
    end = perf_counter() + limit_s
    count, step_s = (20, 2e-3) if settings.quick else (2000, 20e-3)
    alone = [longest_gap(step_s) for _ in range(count // 4)]
    loader = contender.make(job(settings, SMALL, (count + count // 10) * settings.batch), settings.device)
    batches = iter(loader)
    for _ in range(count // 20):  # until it has settled
        next(batches)
        longest_gap(step_s)
    gaps: list[float] = []
    nexts: list[float] = []
    before = _stalls(loader)
    while len(gaps) < count and perf_counter() < end:
        asked = perf_counter()
        next(batches)
        nexts.append(perf_counter() - asked)
        gaps.append(longest_gap(step_s))
    made_by_device(loader)
    return [
        {"name": "without a loader", "steps": len(alone), **tail("pause", alone, _PERCENTILES)},
        {
            "name": "hybrid",
            "steps": len(gaps),
            "steps_that_waited": _stalls(loader) - before,
            **tail("pause", gaps, _PERCENTILES),
            **tail("next", nexts, _PERCENTILES),
        },
    ]


def longest_gap(seconds: float) -> float:
    """The longest time between two looks at the clock in a loop that does nothing else."""
    before = perf_counter()
    end, longest = before + seconds, 0.0
    while before < end:
        now = perf_counter()
        longest = max(longest, now - before)
        before = now
    return longest


def _stalls(loader: Any) -> int:
    return sum(int(stall["count"]) for stall in loader.stats()["stalls"].values())
