"""A row of figures from the runs of one loader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.session.measure import Run

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
