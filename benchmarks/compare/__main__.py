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
from pathlib import Path
from typing import Any

import click

from benchmarks import report
from benchmarks.compare.ratios import against_peers
from benchmarks.compare.run import CANDIDATES, Case, Run, peak_pss_bytes, run
from benchmarks.compare.workloads import job
from benchmarks.data.__main__ import WORKLOADS
from benchmarks.isolate import MeasurementError, isolated
from benchmarks.peers import Loader, installed
from benchmarks.turns import fastest, measured_rows, select
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
    base: Case, loaders: Sequence[Loader], loads: Sequence[float], repetitions: int, *, quick: bool
) -> Iterator[dict[str, Any]]:
    """All rows of one workload and one number of workers: its peers tuned first (not if ``quick``), then every load."""
    asked = job(base.workload, base.directory, 1)
    here = [loader for loader in loaders if installed(loader) and loader.can_run(asked)]
    chosen = here if quick else [tuned(base, loader) for loader in here]
    for load in loads:
        yield from case_rows(base.with_step(load), chosen, repetitions)


def tuned(case: Case, loader: Loader) -> Loader:
    """The loader with those of its settings that prepare most samples per second without a step."""
    if len(CANDIDATES[loader.name]) == 1:
        return loader

    def rate(tried: Loader) -> float:
        return isolated(run, case, tried, timeout_s=_limit_s(case)).samples_per_s

    best = fastest(f"{case.workload}, {loader.name}", CANDIDATES[loader.name], rate)
    return loader if best is None else best[1]


def case_rows(case: Case, loaders: Sequence[Loader], repetitions: int) -> Iterator[dict[str, Any]]:
    """A row for each loader; they take turns within each repetition.

    What the work costs is measured again in each repetition: the machine is not always equally fast. Memory is watched
    in a run of its own.
    """
    now = case

    def measure(loader: Loader) -> Run:
        nonlocal now
        if loader is loaders[0]:
            now = isolated(case.measured_again, timeout_s=_limit_s(case))
        return isolated(run, now, loader, timeout_s=_limit_s(case))

    name = f"{case.workload}, {case.workers} workers, step {1e3 * case.step_s:.1f} ms"
    rows, runs = measured_rows(name, loaders, repetitions, measure)
    for row, loader in zip(rows, loaders, strict=True):
        try:
            row["peak_pss_bytes"] = isolated(peak_pss_bytes, case, loader, timeout_s=_limit_s(case))
        except MeasurementError as error:
            row["error"] = str(error)
        row |= {
            "workload": case.workload,
            "step": "emulated" if case.load else "none",
            "step_ms": 1e3 * case.step_s,
            "load": case.load,
            "workers": case.workers,
            "cpu_s": case.cpu_s,
            "samples": case.samples,
            "batch_size": case.batch_size,
        }
        if runs[loader.name]:
            row["loader_settings"] = runs[loader.name][0].settings
        yield row | against_peers(loader, loaders, runs)


def _limit_s(case: Case) -> float:
    return 60 + 40 * case.cpu_s


@report.benchmark("compare", 5, shown=_SHOWN)
@click.argument("names", metavar="[WORKLOAD]...", nargs=-1, type=click.Choice(list(WORKLOADS)))
@report.loader_option
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), help="DIR/WORKLOAD made by benchmarks.data.")
@click.option("--workers", "counts", type=click.IntRange(min=1), multiple=True, help="Default: one for each core.")
@click.option("--load", "loads", type=float, multiple=True, help=f"Work over steps, 0: no step. Default: {LOADS}.")
def main(
    quick: bool,
    repetitions: int,
    names: tuple[str, ...],
    wanted: tuple[str, ...],
    data: Path | None,
    counts: tuple[int, ...],
    loads: tuple[float, ...],
) -> Iterator[dict[str, Any]]:
    loaders = select("loader", [tried[0] for tried in CANDIDATES.values()], wanted or (_QUICK if quick else ()))
    loads = loads or ((0.0,) if quick else LOADS)
    with tempfile.TemporaryDirectory() as scratch:
        for name in names or tuple(WORKLOADS):
            directory = (data or Path(scratch)) / name
            if not directory.exists():
                report.progress(f"making data for {name} in {directory}")
                directory.mkdir(parents=True)
                for _ in WORKLOADS[name].write(directory, 24 if quick else 300):
                    pass
            for count in counts or (usable_cores(),):
                base = isolated(Case.measured, name, directory, count, sleep_overshoot_s())
                yield from rows_of(base, loaders, loads, repetitions, quick=quick)


if __name__ == "__main__":
    main()
