"""How loaders do on a machine that others use: cells of ``benchmarks.scaling`` beside processes that compute for ever.

Samples sleep for their cost (emulated cores), so what counts is how soon workers and the training process get a core
when they want one. The bound is that of the quiet machine; ``bare_of_bound`` is what as many processes reach without
any loader, beside the same work. Loaders take turns within each repetition; ``ratio_to_pytorch`` has its 95 % interval.

``--step`` measures the training step instead: a thread sleeps, as one that waits for a GPU does, while two workers
compute on each core. ``late_p50_us`` and ``late_p99_us`` are percentiles of how long it then waits for a core.

Rejected: short slices for the training thread (``sched_setattr`` with a runtime, Linux 6.12 and later). With slices of
0.1 ms the 99th percentile was 5.9 ms in place of 5.5 (medians of five runs; two cores, Linux 6.18).
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import click
import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from benchmarks import report
from benchmarks.isolate import isolated
from benchmarks.peers import choose, installed
from benchmarks.peers.minato import constructor
from benchmarks.scaling.__main__ import cell_rows
from benchmarks.scaling.cells import BATCH_SIZE, Cell
from benchmarks.scaling.loaders import LOADERS
from benchmarks.scaling.measure import Plan, bare
from benchmarks.turns import in_turns
from benchmarks.work import calibrate, work
from minato_gpu.lab.report import write
from minato_gpu.threads import usable_cores

BUSY = (0, 2, 8)
CELLS = (
    Cell(8, 1, "none"),
    Cell(2, 3, "half"),
    Cell(8, 3, "half"),
    Cell(8, 3, "tail"),
    Cell(32, 3, "half"),
    Cell(32, 10, "half"),
)
WANTED = ("pytorch in order", "pytorch out of order", "spdl processes by batch", "minato_gpu")
"""Parts of the names of loaders: PyTorch's, SPDL's pipeline, and this one."""

_COLUMNS = (
    *("loader", "of_bound", "of_bound_spread", "bare_of_bound", "samples_per_s"),
    *("ratio_to_pytorch", "ratio_to_pytorch_low", "ratio_to_pytorch_high", "late_p50_us", "late_p99_us", "error"),
)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that compute until the end of the context."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_compute, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _compute() -> None:
    number = 0
    while True:
        number = work(10_000, number)


def cells(quick: bool, repetitions: int) -> Iterator[dict[str, Any]]:
    """A row for each cell, number of busy processes and loader."""
    loaders = [each for word in WANTED for each in choose(LOADERS, (word,)) if installed(each)]
    for cell in CELLS[:1] if quick else CELLS:
        plan: Plan = isolated(Plan.measured, cell, *((4, 0.1) if quick else (None,)))
        for count in BUSY[:2] if quick else BUSY:
            with busy(count):
                together = isolated(bare, cell, plan.costs_s, cell.workers, 0.1 if quick else 1.0)
                rows = cell_rows(replace(plan, together=together), list(dict.fromkeys(loaders)), repetitions)
            for row in rows:
                yield {**row, "case": f"{cell.name}, beside {count} busy processes", "busy": count}


# --- the step ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A loader, and whether its workers give way."""

    name: str
    make: Callable[..., Iterable[Any]]
    nice: bool = False


WAYS = (
    Way("pytorch", TorchDataLoader),
    Way("minato_gpu", lambda *a, **more: constructor()(*a, **more)),
    Way("minato_gpu, os.nice(10) in worker_init_fn", lambda *a, **more: constructor()(*a, **more), nice=True),
)


class Computing(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that cost so many operations of ``work``."""

    def __init__(self, samples: int, operations: int) -> None:
        self.samples, self.operations = samples, operations

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(work(self.operations, index))


def lateness(way: Way, operations: int, seconds: float) -> list[float]:
    """Seconds by which sleeps of 5 ms are late in a thread that takes batches. Call it in a fresh process."""
    init = _give_way if way.nice else None
    data = Computing(1_000_000, operations)
    batches = iter(way.make(data, 4, num_workers=2 * usable_cores(), worker_init_fn=init))
    found: list[float] = []
    next(batches)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        next(batches)
        for _ in range(4):
            begin = time.perf_counter()
            time.sleep(5e-3)
            found.append(time.perf_counter() - begin - 5e-3)
    return found


def _give_way(worker: int) -> None:
    os.nice(10)


def steps(quick: bool, repetitions: int) -> Iterator[dict[str, Any]]:
    """A row for each way."""
    operations = round(calibrate() * 5)
    seconds = 0.2 if quick else 5.0

    def measure(way: Way) -> list[float]:
        return isolated(lateness, way, operations, seconds)

    def figures(found: list[float]) -> str:
        return f"{1e6 * np.percentile(found, 99):.0f} us late at the 99th percentile"

    runs, errors = in_turns("a step's end", WAYS, repetitions, measure, figures)
    for way in WAYS:
        row: dict[str, Any] = {"case": "a step's end", "loader": way.name, "repetitions": len(runs[way.name])}
        if way.name in errors:
            row["error"] = errors[way.name]
        if runs[way.name]:
            for percentile in (50, 99):
                late = [1e6 * float(np.percentile(found, percentile)) for found in runs[way.name]]
                row |= report.summarise(f"late_p{percentile}", late, "_us")
        yield row


@click.command(help=__doc__)
@report.command
@click.option("--step", is_flag=True, help="How long the end of a training step waits for a core.")
def main(json_path: str | None, quick: bool, repetitions: int | None, step: bool) -> None:
    """See the module's head."""
    count = repetitions or (1 if quick else 5)
    rows: list[dict[str, Any]] = []
    settings = {"samples": "sleep: emulated cores", "batch_size": BATCH_SIZE, "repetitions": count, "quick": quick}
    for row in (steps if step else cells)(quick, count):
        rows.append(row)
        if json_path is not None and json_path != "-":  # an hour may be lost
            write(report.document("busy", settings, rows), json_path)
    report.publish(report.document("busy", settings, rows), json_path, _COLUMNS)
    if any("error" in row for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
