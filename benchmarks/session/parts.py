"""The parts that compare loaders: ``tune``, ``rates``, ``training``, ``light``, ``memory``.

Every run is in a process of its own, loaders take turns within each repetition, and no repetition begins that would
not end in time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from benchmarks import report
from benchmarks.isolate import MeasurementError, isolated
from benchmarks.session import loaders, measure, steps
from benchmarks.session.loaders import Contender, Ours
from benchmarks.session.measure import Run
from benchmarks.session.settings import Settings
from benchmarks.session.work import MIXED, SMALL
from benchmarks.turns import in_turns

Rows = list[dict[str, Any]]

DEVICE_BUDGET = 500_000_000
"""Bytes of the second run of ``memory``: three batches of 256 photographs; what DALI works with comes on top."""

_START_S = 60.0  # what a run may take beside what is timed
_LEAST_S = 5.0  # what whoever comes last may take: several of these fit between a part's deadline and its limit


@dataclass(frozen=True)
class Asked:
    """What a part is given: the ``rows`` of the parts before it, and when it should be through (``perf_counter``)."""

    settings: Settings
    rows: Sequence[Mapping[str, Any]]
    deadline: float

    def time_for(self, seconds: float) -> bool:
        """Whether something that takes so long is through in time."""
        return perf_counter() + seconds < self.deadline

    def limit_s(self, seconds: float) -> float:
        """How long something may take that would be given so long: a part that is ended loses all that it has found."""
        return max(_LEAST_S, min(seconds, self.deadline - perf_counter()))


def tune(asked: Asked) -> Rows:
    """Each peer's settings, without a step: changes are tried in turn, and what is faster is kept."""
    settings, rows = asked.settings, []
    changes = loaders.changes(quick=settings.quick)
    for name, base in loaders.peers(settings).items():
        best: dict[str, Any] | None = None
        tried: Rows = []
        for change in ({}, *changes[name]):
            if not loaders.available(base) or (best is not None and not asked.time_for(15.0)):
                break
            contender = base if best is None else _changed(base, {**best["loader_settings"], **change})
            row: dict[str, Any] = {"name": name, "loader_settings": contender.settings(), "chosen": False}
            tried.append(row)
            try:
                found = _run(asked, contender, MIXED, steps.EMPTY, settings.tried_s)
            except MeasurementError as error:
                row["error"] = _short(error)
                report.progress(f"tune, {contender} failed:\n{error}")
                best = best or row
                continue
            row["samples_per_s"] = found.samples_per_s
            report.progress(f"tune, {contender}: {found.samples_per_s:.0f} samples/s")
            if best is None or found.samples_per_s > best.get("samples_per_s", 0.0):
                best = row
        if best is not None:
            best["chosen"] = True
        rows += tried or [_missing(base)]
    return rows


def rates(asked: Asked) -> Rows:
    """All photographs, no step: how fast each loader is. ``hybrid_of_sum`` is in the targets."""
    return _compared(asked, [*_ours(asked), *chosen_peers(asked)], MIXED, steps.EMPTY)


def training(asked: Asked) -> Rows:
    """All photographs, ResNet-50."""
    return _compared(asked, [*_ours(asked), *chosen_peers(asked)], MIXED, steps.TRAINING)


def light(asked: Asked) -> Rows:
    """Small photographs, ResNet-50: the CPU lane alone should do."""
    cpu, _, hybrid = _ours(asked)
    peers = chosen_peers(asked)[: 1 if asked.settings.quick else None]
    return _compared(asked, [cpu, hybrid, *peers], SMALL, steps.TRAINING)


def memory(asked: Asked) -> Rows:
    """The device's memory that a loader takes, its ready batches included, beyond what was in use without one."""
    settings = asked.settings
    hybrid = _ours(asked)[2]
    bounded = replace(hybrid, name="hybrid, budget", device_memory_budget=DEVICE_BUDGET)
    contenders: list[Contender] = [hybrid, bounded, *(each for each in chosen_peers(asked) if each.name == "dali")]

    def one(contender: Contender) -> Run:
        return isolated(
            measure.memory,
            settings,
            contender,
            MIXED,
            timeout_s=asked.limit_s(_START_S + settings.timed_s),
            settle_s=settings.settle_s,
        )

    return _rows(asked, contenders, MIXED, steps.EMPTY, one, 1)


def chosen_peers(asked: Asked) -> list[Contender]:
    """The peers with the settings that ``tune`` has found; as they are where it has not run."""
    found = {row["name"]: row for row in asked.rows if row.get("case") == "tune" and row.get("chosen")}
    bases = loaders.peers(asked.settings)
    return [_changed(base, found[name]["loader_settings"]) if name in found else base for name, base in bases.items()]


def _changed(base: Contender, settings: Mapping[str, Any]) -> Contender:
    changed: Contender = replace(base, **settings)  # type: ignore[type-var]
    return changed


def _ours(asked: Asked) -> tuple[Ours, Ours, Ours]:
    return loaders.ours(asked.settings.workers)


def _compared(asked: Asked, contenders: Sequence[Contender], which: str, step: str) -> Rows:
    def one(contender: Contender) -> Run:
        return _run(asked, contender, which, step, asked.settings.timed_s)

    return _rows(asked, contenders, which, step, one, asked.settings.repetitions)


def _run(asked: Asked, contender: Contender, which: str, step: str, timed_s: float) -> Run:
    return isolated(
        measure.run,
        asked.settings,
        contender,
        which,
        step,
        timed_s,
        timeout_s=asked.limit_s(_START_S + timed_s),
        settle_s=asked.settings.settle_s,
    )


def _rows(
    asked: Asked,
    contenders: Sequence[Contender],
    which: str,
    step: str,
    one: Callable[[Contender], Run],
    repetitions: int,
) -> Rows:
    """A row for each, in turns; a loader whose package is not here says so."""
    here = [each for each in contenders if loaders.available(each)]
    began, took = perf_counter(), 0.0

    def time_left() -> bool:
        """For a repetition as long as the longest so far."""
        nonlocal began, took
        now = perf_counter()
        took, began = max(took, now - began), now
        return asked.time_for(took)

    where = f"{which} photographs, step {step}"
    runs, errors = in_turns(where, here, repetitions, one, _figures, time_left)
    return [
        {**_row(asked, each, which, step), **_summary(runs.get(each.name, [])), **_error(errors.get(each.name))}
        if each in here
        else {**_row(asked, each, which, step), **_missing(each)}
        for each in contenders
    ]


def _row(asked: Asked, contender: Contender, which: str, step: str) -> dict[str, Any]:
    return {
        "name": contender.name,
        "batch": asked.settings.batch,
        "photographs": which,
        "step": step,
        "loader_settings": contender.settings(),
    }


def _missing(contender: Contender) -> dict[str, Any]:
    return {"name": contender.name, "missing": f"{contender.package} is not installed"}


def _error(error: str | None) -> dict[str, Any]:
    return {} if error is None else {"error": _short(error)}


def _short(error: object) -> str:
    return str(error)[-2000:]


def _figures(found: Run) -> str:
    return f"{found.samples_per_s:.0f} samples/s, step {1e3 * found.step_s:.2f} ms"


def _summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Medians and spread; ``samples_per_s_each`` and ``step_slowdown_each`` by repetition, for pairing."""
    if not runs:
        return {}
    row: dict[str, Any] = {
        "repetitions": len(runs),
        **report.summarise("samples_per_s", [each.samples_per_s for each in runs]),
        "samples_per_s_each": [each.samples_per_s for each in runs],
        **report.summarise("step", [each.step_s for each in runs], "_s"),
        **report.summarise("next_p50", [each.next_p50_s for each in runs], "_s"),
        **report.summarise("next_p99", [each.next_p99_s for each in runs], "_s"),
        "batches": sum(each.batches for each in runs),
        "stats": runs[-1].stats,
    }
    pairs = [(each.step_s, each.resident_step_s) for each in runs if each.resident_step_s is not None]
    if pairs:
        slowdowns = [loading / resident - 1 for loading, resident in pairs]
        row |= report.summarise("resident_step", [resident for _, resident in pairs], "_s")
        row |= {**report.summarise("step_slowdown", slowdowns), "step_slowdown_each": slowdowns}
    peaks = [each.device_bytes_peak for each in runs if each.device_bytes_peak is not None]
    if peaks:
        row["device_bytes_peak"] = max(peaks)
    learned = runs[-1].stats.get("device_lane", {})
    if "step_s_per_work_s" in learned:
        row |= {"learned_step_s_per_device_s": learned["step_s_per_work_s"], "device_spared": learned["spared"]}
    return row
