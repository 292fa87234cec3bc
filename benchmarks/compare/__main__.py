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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from benchmarks import report
from benchmarks.compare.ratios import against_peers
from benchmarks.compare.run import CANDIDATES, Case, Run, run, watched
from benchmarks.compare.workloads import job
from benchmarks.data.__main__ import WORKLOADS
from benchmarks.isolate import MeasurementError, isolated
from benchmarks.peers import Loader, installed
from benchmarks.turns import measured_rows
from benchmarks.work import sleep_overshoot_s
from minato_gpu.util.threads import usable_cores

LOADS = (0.0, 1.25, 0.8)
_QUICK = (
    "pytorch in order",
    "torchdata in order",
    "spdl in order",
    "dali",
    "minato_gpu in order",
    "minato_gpu bounded",
)
_SHOWN = (
    *("loader", "samples_per_s", "samples_per_s_spread", "efficiency", "au", "first_batch_s", "epoch_gap_s"),
    *("wait_p99_s", "cpu_s_per_sample", "peak_pss_bytes", "lateness_max", "ratio_to_peer", "ratio_to_peer_low"),
    *("ratio_to_peer_high", "error"),
)


def rows_of(
    base: Case, loaders: Sequence[str], loads: Sequence[float], repetitions: int, *, quick: bool
) -> Iterator[dict[str, Any]]:
    """All rows of one workload and one number of workers: its peers tuned first (not if ``quick``), then every load."""
    candidates = [CANDIDATES[name] for name in loaders if _can_run(CANDIDATES[name][0], base.workload, base.directory)]
    chosen = [each[0] if quick else tuned(base, each) for each in candidates]
    for load in loads:
        yield from case_rows(base.with_step(load), chosen, repetitions, quick=quick)


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


def case_rows(case: Case, loaders: Sequence[Loader], repetitions: int, *, quick: bool) -> Iterator[dict[str, Any]]:
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

    name = f"{case.workload}, {case.workers} workers, step {1e3 * case.step_s:.1f} ms"
    rows, runs = measured_rows(name, loaders, repetitions, measure, figures)
    for row, loader in zip(rows, loaders, strict=True):
        if not quick:
            shorter = replace(case, epochs=1, warm_ups=1)
            try:
                _, peaks[loader.name] = isolated(watched, shorter, loader, timeout_s=_limit_s(case))
            except MeasurementError as error:
                row["error"] = str(error)
        row |= {
            "workload": case.workload,
            "step": "emulated" if case.load else "none",
            "step_ms": 1e3 * case.step_s,
            "load": case.load,
            "workers": case.workers,
            "cpu_s": case.cpu_s,
            "samples": case.samples * case.epochs,
            "batch_size": case.batch_size,
            "peak_pss_bytes": peaks.get(loader.name),
        }
        if runs[loader.name]:
            row["loader_settings"] = runs[loader.name][0].settings
        yield row | against_peers(loader, loaders, runs)


def _limit_s(case: Case) -> float:
    return 60 + 20 * (case.epochs + case.warm_ups) * case.cpu_s


def _can_run(loader: Loader, name: str, directory: Path) -> bool:
    possible = getattr(loader, "can_run", None)
    return installed(loader) and (possible is None or possible(job(name, directory, 1)))


@report.benchmark("compare", 5, shown=_SHOWN)
@click.argument("names", metavar="[WORKLOAD]...", nargs=-1, type=click.Choice(list(WORKLOADS)))
@report.loader_option
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), help="DIR/WORKLOAD made by benchmarks.data.")
@click.option("--workers", "counts", type=click.IntRange(min=1), multiple=True, help="Default: one for each core.")
@click.option("--load", "loads", type=float, multiple=True, help=f"Work over steps, 0: no step. Default: {LOADS}.")
@click.option("--epochs", type=click.IntRange(min=1), default=1, show_default=True, help="That are timed.")
@click.option("--warm-ups", type=click.IntRange(min=1), default=1, show_default=True, help="Epochs before those.")
def main(
    quick: bool,
    repetitions: int,
    names: tuple[str, ...],
    wanted: tuple[str, ...],
    data: Path | None,
    counts: tuple[int, ...],
    loads: tuple[float, ...],
    epochs: int,
    warm_ups: int,
) -> Iterator[dict[str, Any]]:
    wanted = wanted or (_QUICK if quick else ())
    loaders = [name for name in CANDIDATES if not wanted or any(word in name for word in wanted)]
    if not loaders:
        raise click.UsageError(f"no loader is called {wanted!r}; there are: {', '.join(CANDIDATES)}")
    loads = loads or ((0.0,) if quick else LOADS)
    with tempfile.TemporaryDirectory() as scratch:
        for name in names or tuple(WORKLOADS):
            directory = (data or Path(scratch)) / name
            if not directory.exists():
                report.progress(f"making data for {name} in {directory}")
                directory.mkdir(parents=True)
                for _ in WORKLOADS[name].write(directory, 24 if quick else 300, 0):
                    pass
            for count in counts or (usable_cores(),):
                base = isolated(Case.measured, name, directory, count, epochs, sleep_overshoot_s())
                yield from rows_of(replace(base, warm_ups=warm_ups), loaders, loads, repetitions, quick=quick)


if __name__ == "__main__":
    main()
