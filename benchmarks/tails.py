"""Slow samples: how close every loader comes to the lower bound of the time that its work takes.

A consumer takes batch after batch and trains for a fixed time on each. That step is emulated: the consumer reads every
byte of the batch and sleeps for the rest of the step (an emulated accelerator, which takes no core). The work is so
many operations for each sample, the same for every loader.

    bound      = minimum to the first batch + max(steps, single-process CPU seconds / cores)
    efficiency = bound / measured

The minimum to the first batch is the work of the cheapest samples that make a batch, on all cores. Every loader runs
in a fresh process, after another that took one batch, so that its files are in memory. Its first batch is timed from
its construction, cold; that epoch goes on without steps and warms the workers up; then the clock starts for the epochs
that count. What a loader had prepared of those before the clock started (some overlap epochs) is taken off the work in
its bound, and what it prepares meanwhile for later ones is added, so that it neither gains nor loses by it. Loaders
take turns within each repetition. ``simulated_efficiency`` is what the loader's policy reaches under a virtual clock
with as many samples in flight (see ``benchmarks.simulated``), and ``simulated_with_overhead`` what it reaches where
every sample takes as much longer as all processes together took CPU time beyond the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from benchmarks import report, simulated
from benchmarks.cases import CASES, Case
from benchmarks.isolate import isolated
from benchmarks.peers import COSTLY, TRIVIAL, Loader, choose, installed
from benchmarks.tail_run import Plan, Run, rehearse, run
from benchmarks.turns import in_turns
from benchmarks.work import calibrate, sleep_overshoot_s

_COLUMNS = (
    "loader",
    "efficiency",
    "efficiency_spread",
    "simulated_efficiency",
    "simulated_with_overhead",
    "first_batch_s",
    "first_batch_spread_s",
    "peak_bytes_in_flight",
    "peak_rss_bytes",
    "warm",
    "error",
)


def case_rows(plan: Plan, loaders: Sequence[Loader], repetitions: int, timeout_s: float) -> list[dict[str, Any]]:
    """A row for each loader on one case; the loaders take turns within each repetition."""

    def measure(loader: Loader) -> Run:
        isolated(rehearse, plan, loader, timeout_s=timeout_s)
        return isolated(run, plan, loader, timeout_s=timeout_s)

    def figures(one: Run) -> str:
        return f"{one.efficiency:.3f}, first batch {one.first_batch_s:.3f} s"

    runs, errors = in_turns(plan.case.name, loaders, repetitions, measure, figures)
    return [_row(plan, loader, runs[loader.name], errors.get(loader.name)) for loader in loaders]


def _row(plan: Plan, loader: Loader, runs: Sequence[Run], error: str | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "case": plan.case.name,
        "loader": loader.name,
        "order": loader.order,
        "warm": loader.warm,
        "emulated_step_s": plan.step_s,
        "cpu_s_alone": plan.cpu_s,
        "repetitions": len(runs),
    }
    if runs:
        row |= report.summarise("efficiency", [each.efficiency for each in runs])
        row |= report.summarise("first_batch", [each.first_batch_s for each in runs], "_s")
        for key in ("elapsed_s", "bound_s", "prepared_ahead_s", "left_ahead_s", "cpu_s"):
            row[key] = report.median([getattr(each, key) for each in runs])
        for key in ("peak_bytes_in_flight", "peak_rss_bytes"):
            row[key] = max(getattr(each, key) for each in runs)
        in_flight = row["peak_bytes_in_flight"] // (8 * plan.case.words)
        overhead = plan.overhead(row["cpu_s"], row["prepared_ahead_s"], row["left_ahead_s"])
        row["simulated_efficiency"] = simulated.efficiency(plan, loader, in_flight)
        row["simulated_with_overhead"] = simulated.efficiency(plan, loader, in_flight, overhead)
    if error is not None:
        row["error"] = error
    row["loader_settings"] = ", ".join(f"{key}={value}" for key, value in loader.settings(plan.job()).items())
    return row


def _selected(names: Sequence[str]) -> list[Case]:
    for name in names:
        if not any(name in case.name for case in CASES):
            raise click.UsageError(f"no case is called {name!r}; there are: {'; '.join(case.name for case in CASES)}")
    return [case for case in CASES if not names or any(name in case.name for name in names)]


@click.command(help=__doc__)
@report.command
@click.option("--loader", "wanted", multiple=True, help="Only loaders whose name contains this word; repeatable.")
@click.option("--case", "names", multiple=True, help="Only cases whose name contains this word; repeatable.")
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True)
def main(
    json_path: str | None,
    quick: bool,
    repetitions: int | None,
    wanted: tuple[str, ...],
    names: tuple[str, ...],
    workers: int,
) -> None:
    cases = _selected(names)
    try:
        chosen = choose([*COSTLY, *TRIVIAL], wanted)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    present = [loader for loader in chosen if installed(loader)]
    repetitions = repetitions or (1 if quick else 3)
    # A toy run takes a tenth of the work for each sample, too.
    per_ms = calibrate() * (0.1 if quick else 1.0)
    overshoot_s = sleep_overshoot_s()
    rows: list[dict[str, Any]] = []
    slowdowns = {}
    for case in cases:
        plan = isolated(Plan.measured, case, workers, per_ms, overshoot_s, quick)
        slowdowns[case.name] = plan.parallel_slowdown
        loaders = [loader for loader in (TRIVIAL if case.trivial else COSTLY) if loader in present]
        rows += case_rows(plan, loaders, repetitions, timeout_s=60 + 20 * plan.bound_s())
    settings = {
        "workers": workers,
        "operations_per_ms": per_ms,
        "sleep_overshoot_s": overshoot_s,
        "parallel_slowdown": slowdowns,
        "step": "emulated",
        "repetitions": repetitions,
        "quick": quick,
        "not_installed": sorted({loader.name for loader in chosen if loader not in present}),
    }
    report.publish(report.document("tails", settings, rows), json_path, _COLUMNS)
    if any("error" in row for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
