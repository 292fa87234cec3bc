"""The part ``price``: what the device lane does to training."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.session import measure, steps
from benchmarks.session.loaders import ours
from benchmarks.session.settings import NO_TIME, Request, Row, Settings
from benchmarks.session.work import job

EVERY = (0, 8, 4, 2, 1)
"""Of so many steps one takes a batch that the device lane has prepared; 0: none."""

_LEAST_S, _MOST_S = 40.0, 600.0


def price(request: Request) -> Iterator[Row]:
    """ResNet-50 on resident batches while the device lane works so much: its share of the time, and the step.

    The last row's ``step_s_per_device_s`` is the slope of the least-squares line through (seconds of device work for
    each step, seconds of the step): what the loader learns while running, here known from the whole range.
    """
    if not request.settings.quick and not request.time_for(_LEAST_S):
        yield {"name": "slope", "missing": NO_TIME}
        return
    yield from priced_rows(request.isolated(_MOST_S, _priced, request.settings, request.deadline))


def priced_rows(points: list[dict[str, float]]) -> list[Row]:
    """Rows from points {"every", "device_busy", "device_s_per_step", "step_s"}, of which some have every = 0."""
    alone = report.median([point["step_s"] for point in points if not point["every"]])
    rows: list[Row] = []
    for every in dict.fromkeys(int(point["every"]) for point in points):
        here = [point for point in points if point["every"] == every]
        row: Row = {"name": f"a batch for every {every} steps" if every else "no device work"}
        for name, unit in (("device_busy", ""), ("device_s_per_step", ""), ("step", "_s")):
            row |= report.summarise(name, [point[f"{name}{unit}"] for point in here], unit)
        rows.append({**row, "repetitions": len(here), "step_slowdown": row["step_s"] / alone - 1})
    work, took = (np.array([point[name] for point in points]) for name in ("device_s_per_step", "step_s"))
    slope = float(np.polyfit(work, took, 1)[0]) if np.ptp(work) else None
    return [*rows, {"name": "slope", "step_s_per_device_s": slope}]


def _priced(settings: Settings, deadline: float) -> list[dict[str, float]]:
    """The points; a second round only while there is time for another."""
    measure.begin(settings)
    step = steps.make(steps.TRAINING, settings)
    resident = steps.resident(settings)
    loader = ours(settings.workers)[2].make(job(settings), settings.device)
    batches, points, took_s = iter(loader), [], 0.0
    next(batches)
    for _ in range(min(2, settings.repetitions)):
        begun = perf_counter()
        if begun + 1.2 * took_s > deadline:
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
            point = {"every": float(every), "device_busy": worked / elapsed, "device_s_per_step": worked / len(watch)}
            points.append({**point, "step_s": float(np.mean(took))})  # a median would not see that every eighth is long
        took_s = perf_counter() - begun
    measure.made_by_device(loader)
    return points


def _device_s(loader: Any) -> float:
    """Seconds that the device lane has worked in this epoch."""
    stats = loader.stats()
    lane = stats["lanes"].get("device")
    return 0.0 if lane is None else float(lane["busy_share"] * stats["elapsed_s"] * max(lane["slots"], 1))
