"""The four workloads through PyTorch, torchdata, SPDL, DALI and this loader: ``python -m benchmarks.compare``.

Every loader prepares the same samples by the same transforms (compared within the run), on the same cores, for the same
emulated steps, from loader-bound (no step) to step-bound. Before its figures count, each peer's settings are swept
without a step, and the fastest are taken. Loaders take turns within each repetition, each in a fresh process.

    CPU seconds = what one process, alone, needs to prepare, join and read all samples
    bound       = least time to the first batch (out of order: to any) + max(steps, CPU seconds / cores)
    efficiency  = bound / measured
    AU          = steps / measured

Rates of this loader are also given over those of the best peer in the same order, paired by repetition.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from benchmarks import report
from benchmarks.compare.case import Case
from benchmarks.compare.loaders import CANDIDATES
from benchmarks.compare.ratios import against_peers
from benchmarks.compare.run import Run, run, watched
from benchmarks.compare.workloads import job
from benchmarks.data.__main__ import WORKLOADS
from benchmarks.isolate import MeasurementError, isolated
from benchmarks.peers import Loader, installed
from benchmarks.turns import in_turns
from benchmarks.work import sleep_overshoot_s
from minato_gpu.threads import usable_cores

LOADS = (0.0, 1.25, 0.8)
_QUICK = (
    "pytorch in order",
    "torchdata in order",
    "spdl in order",
    "dali",
    "minato_gpu in order",
    "minato_gpu bounded",
)
_COLUMNS = (
    "loader",
    "samples_per_s",
    "samples_per_s_spread",
    "efficiency",
    "au",
    "first_batch_s",
    "epoch_gap_s",
    "wait_p99_s",
    "cpu_s_per_sample",
    "peak_pss_bytes",
    "lateness_max",
    "ratio_to_peer",
    "ratio_to_peer_low",
    "ratio_to_peer_high",
    "error",
)


def rows_of(
    name: str,
    directory: Path,
    loaders: Sequence[str],
    workers: int,
    loads: Sequence[float],
    repetitions: int,
    epochs: int,
    warm_ups: int,
    *,
    quick: bool,
) -> list[dict[str, Any]]:
    """All rows of one workload and one number of workers: its peers tuned first (not if ``quick``), then every load."""
    base = isolated(Case.measured, name, directory, workers, epochs, sleep_overshoot_s())
    base = replace(base, warm_ups=warm_ups)
    candidates = [CANDIDATES[loader] for loader in loaders if _can_run(CANDIDATES[loader][0], name, directory)]
    chosen = [each[0] if quick else tuned(base, each) for each in candidates]
    rows = []
    for load in loads:
        rows += case_rows(base.with_step(load), chosen, repetitions, quick=quick)
    return rows


def tuned(case: Case, candidates: Sequence[Loader]) -> Loader:
    """The candidate that prepares most samples per second without a step."""
    if len(candidates) == 1:
        return candidates[0]
    rates = [_rate(replace(case, epochs=1, warm_ups=1), each) for each in candidates]
    best = candidates[rates.index(max(rates))]
    report.progress(f"{case.workload}, {best.name}: {', '.join(f'{rate:.0f}' for rate in rates)} samples/s -> {best}")
    return best


def _rate(case: Case, loader: Loader) -> float:
    try:
        return isolated(run, case, loader, timeout_s=_limit_s(case)).samples_per_s
    except MeasurementError as error:
        report.progress(f"{case.workload}, {loader} failed:\n{error}")
        return 0.0


def case_rows(case: Case, loaders: Sequence[Loader], repetitions: int, *, quick: bool) -> list[dict[str, Any]]:
    """A row for each loader; they take turns within each repetition.

    What the work costs is measured again in each repetition: the machine is not always equally fast. Memory is watched
    in a run of its own; if ``quick``, in the same.
    """
    now = case
    peaks: dict[str, int] = {}

    def measure(loader: Loader) -> Run:
        nonlocal now
        if loader is loaders[0] and not quick:
            now = isolated(case.measured_again, timeout_s=_limit_s(case))
        if not quick:
            return isolated(run, now, loader, timeout_s=_limit_s(case))
        measured, peaks[loader.name] = isolated(watched, now, loader, timeout_s=_limit_s(case))
        return measured

    def figures(one: Run) -> str:
        return f"{one.samples_per_s:.1f} samples/s, efficiency {one.efficiency:.3f}"

    where = f"{case.workload}, {case.workers} workers, load {case.load:g}"
    runs, errors = in_turns(where, loaders, repetitions, measure, figures)
    if not quick:
        for loader in loaders:
            try:
                _, peaks[loader.name] = isolated(
                    watched, replace(case, epochs=1, warm_ups=1), loader, timeout_s=_limit_s(case)
                )
            except MeasurementError as error:
                errors[loader.name] = str(error)
    return [
        _row(case, loader, runs[loader.name], peaks.get(loader.name), errors.get(loader.name))
        | against_peers(loader, loaders, runs)
        for loader in loaders
    ]


def _row(case: Case, loader: Loader, runs: Sequence[Run], peak: int | None, error: str | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "case": f"{case.workload}, {case.workers} workers, step {1e3 * case.step_s:.1f} ms",
        "workload": case.workload,
        "loader": loader.name,
        "order": loader.order,
        "step": "emulated" if case.load else "none",
        "step_ms": 1e3 * case.step_s,
        "load": case.load,
        "workers": case.workers,
        "repetitions": len(runs),
        "cpu_s": case.cpu_s,
        "samples": case.samples * case.epochs,
        "batch_size": case.batch_size,
    }
    if runs:
        row["loader_settings"] = runs[0].settings
        for field in fields(Run):
            if field.name != "settings":
                name, unit = (field.name[:-2], "_s") if field.name.endswith("_s") else (field.name, "")
                if field.name == "samples_per_s":
                    name, unit = field.name, ""
                row |= report.summarise(name, [getattr(each, field.name) for each in runs], unit)
    if peak is not None:
        row["peak_pss_bytes"] = peak
    if error is not None:
        row["error"] = error
    return row


def _limit_s(case: Case) -> float:
    return 60 + 20 * (case.epochs + case.warm_ups) * case.cpu_s


def _can_run(loader: Loader, name: str, directory: Path) -> bool:
    possible = getattr(loader, "can_run", None)
    return installed(loader) and (possible is None or possible(job(name, directory, 1)))


@click.command(help=__doc__)
@report.command
@click.argument("names", metavar="[WORKLOAD]...", nargs=-1, type=click.Choice(list(WORKLOADS)))
@click.option("--loader", "wanted", multiple=True, help="Only loaders whose name contains this word; repeatable.")
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), help="DIR/WORKLOAD made by benchmarks.data.")
@click.option("--workers", type=click.IntRange(min=1), multiple=True, help="Repeatable. Default: one for each core.")
@click.option("--load", "loads", type=float, multiple=True, help=f"Work over steps, 0: no step. Default: {LOADS}.")
@click.option("--epochs", type=click.IntRange(min=1), default=1, show_default=True, help="That are timed.")
@click.option("--warm-ups", type=click.IntRange(min=1), default=1, show_default=True, help="Epochs before those.")
def main(
    json_path: str | None,
    quick: bool,
    repetitions: int | None,
    names: tuple[str, ...],
    wanted: tuple[str, ...],
    data: Path | None,
    workers: tuple[int, ...],
    loads: tuple[float, ...],
    epochs: int,
    warm_ups: int,
) -> None:
    wanted = wanted or (_QUICK if quick else ())
    loaders = [name for name in CANDIDATES if not wanted or any(word in name for word in wanted)]
    if not loaders:
        raise click.UsageError(f"no loader is called {wanted!r}; there are: {', '.join(CANDIDATES)}")
    workers = workers or (usable_cores(),)
    repetitions = repetitions or (1 if quick else 5)
    loads = loads or ((0.0,) if quick else LOADS)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in names or tuple(WORKLOADS):
            directory = (data or Path(scratch)) / name
            if not directory.exists():
                report.progress(f"making data for {name} in {directory}")
                directory.mkdir(parents=True)
                for _ in WORKLOADS[name].write(directory, 24 if quick else 300, 0):
                    pass
            for count in workers:
                rows += rows_of(name, directory, loaders, count, loads, repetitions, epochs, warm_ups, quick=quick)
    settings = {"workers": workers, "repetitions": repetitions, "epochs": epochs, "warm_ups": warm_ups, "quick": quick}
    report.publish(report.document("compare", settings, rows), json_path, _COLUMNS)
    if any("error" in row for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
