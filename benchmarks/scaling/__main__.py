"""How close a loader's workers come to all that they could do together, and what the loader spends on it.

Emulated cores: samples sleep for their cost, so that up to 64 workers fit on a few cores, and only what loaders
themselves spend is real. Arrays of 12 KB, batches of 64, another order in each epoch,
persistent workers. Every loader runs in a fresh process; the loaders take turns within each repetition.

    bound    = (sleeps + what samples take beyond them) / workers, or the consumer's steps, where these take longer
    of_bound = bound / measured, of the second epoch

What a sample takes beyond its sleep, the sleep's overshoot above all, is the median of a bare process, alone, measured
in the same run.

What a loader had prepared of that epoch before it began, and left prepared of the next, is counted (as in
``benchmarks.tails``). ``bare_of_bound``: what as many processes reach without any loader.

``main_us_per_sample``: CPU time of the training process, with all its threads and its consumer, which reads every byte.
``workers_us_per_sample``: CPU time of all its descendants, the samples' own work included.

``first_batch_s``: from construction, cold. ``next_us_p50``, ``next_us_p99``: of a third epoch's consumer, which leaves
the loader more time than it needs.

What is measured: every combination of what ``--workers``, ``--cost``, ``--spread`` and ``--load`` say, or (``--named``)
a list of cells.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import click
import numpy as np

from benchmarks import report
from benchmarks.compare.ratios import against_peers
from benchmarks.isolate import isolated
from benchmarks.peers import Loader, take_one
from benchmarks.scaling.cells import BATCH_SIZE, LOADERS, NAMED, SPREADS, Cell, job, worth_trying
from benchmarks.scaling.measure import Plan, Run, run
from benchmarks.turns import measured_rows, present
from benchmarks.work import Slept

_SHOWN = (
    *("loader", "of_bound", "main_us_per_sample", "workers_us_per_sample", "first_batch_s"),
    *("next_us_p50", "ratio_to_peer", "ratio_to_peer_low", "ratio_to_peer_high", "error"),
)
SAMPLES = "sleep: emulated cores, only what loaders themselves spend is real"
_QUICK_BATCHES = 6
_BARE_S, _QUICK_BARE_S = 1.0, 0.1


def cell_rows(plan: Plan, loaders: Sequence[Loader], repetitions: int) -> Iterator[dict[str, Any]]:
    """A row for each loader on one cell; the loaders take turns within each repetition."""
    timeout_s = 60 + 40 * plan.bound_s()
    rehearsed: set[str] = set()

    def measure(loader: Loader) -> Run:
        if loader.name not in rehearsed:
            rehearsed.add(loader.name)
            isolated(take_one, loader, job(plan.cell, Slept(np.full(len(plan.costs_s), 1e-4))), timeout_s=timeout_s)
        return isolated(run, plan, loader, timeout_s=timeout_s)

    cell = plan.cell
    known = {
        "workers": cell.workers,
        "cost_ms": cell.cost_ms,
        "spread": cell.spread,
        "load": cell.load,
        "samples": len(plan.costs_s),
        "bound_s": plan.bound_s(),
        "beyond_sleep_us": 1e6 * plan.alone.beyond_s,
        "bare_of_bound": plan.bare_of_bound,
        "bare_us_per_sample": 1e6 * plan.together.cpu_s_per_sample,
    }
    rows, runs = measured_rows(cell.name, loaders, repetitions, measure)
    for row, loader in zip(rows, loaders, strict=True):
        yield row | known | against_peers(loader, loaders, runs)


@report.benchmark("scaling", 1, shown=_SHOWN, samples=SAMPLES, batch_size=BATCH_SIZE)
@report.loader_option
@click.option("--workers", "counts", type=click.IntRange(min=1), multiple=True, help="8 and 32, if not given.")
@click.option("--cost", "costs_ms", type=float, multiple=True, help="Mean, ms; 3, if not given.")
@click.option("--spread", "spreads", type=click.Choice(SPREADS), multiple=True, help="half, if not given.")
@click.option(
    "--load", "loads", type=float, multiple=True, help="How often the work takes as long as steps; 0: no steps."
)
@click.option("--named", is_flag=True, help=f"The {len(NAMED)} named cells.")
@click.option("--batches", type=click.IntRange(min=1), help="Batches of an epoch, if not as many as fill some seconds.")
def main(
    quick: bool,
    repetitions: int,
    wanted: tuple[str, ...],
    counts: tuple[int, ...],
    costs_ms: tuple[float, ...],
    spreads: tuple[str, ...],
    loads: tuple[float, ...],
    named: bool,
    batches: int | None,
) -> Iterator[dict[str, Any]]:
    asked = counts or (8, 32), costs_ms or (3.0,), spreads or ("half",), loads or (0.0,)
    cells: Iterable[Cell] = NAMED if named else (Cell(*each) for each in itertools.product(*asked))
    loaders = present(LOADERS, wanted)
    batches = batches or (_QUICK_BATCHES if quick else None)
    for cell in cells:
        plan = isolated(Plan.measured, cell, batches, _QUICK_BARE_S if quick else _BARE_S)
        report.progress(
            f"{cell.name}: a sleep takes {1e6 * plan.alone.beyond_s:.0f} us more, bare processes reach "
            f"{plan.bare_of_bound:.3f} of the bound at {1e6 * plan.together.cpu_s_per_sample:.0f} us a sample"
        )
        yield from cell_rows(plan, loaders if wanted else worth_trying(cell, loaders), repetitions)


if __name__ == "__main__":
    main()
