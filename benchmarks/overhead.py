"""What a loader itself costs: samples of 12 KiB that take about a microsecond to make.

Every loader delivers the same batches to a consumer that reads every byte; one epoch, this project's loader with its
defaults, the peers at their best settings. The rate is that of the epoch after its first eighth, so that neither the
start of the workers nor what was prepared ahead before the clock started is in it.

The references take no workers at all: a bare loop over the data set, and PyTorch with ``num_workers=0``. They show
what any loader's consumer could get at most from one core, and do not count for the ratios.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import click
import numpy as np

from benchmarks import report
from benchmarks.content import Consumer, Int64, reference
from benchmarks.datasets import Trivial
from benchmarks.isolate import isolated
from benchmarks.peers import TRIVIAL, Job, Loader, choose, installed
from benchmarks.peers.pytorch import PyTorch
from benchmarks.scheduler_cost import scheduler_rows

_COLUMNS = (
    "loader",
    "order",
    "samples_per_s",
    "samples_per_s_spread",
    "ratio_to_best_pytorch",
    "ratio_to_best_spdl",
    "first_batch_s",
    "window",
    "samples",
    "scheduler_us_per_sample",
    "scheduler_us_per_sample_spread",
    "error",
)


class _Loop:
    """The bare loop: no loader at all."""

    name = "reference: a bare loop"
    package = "numpy"
    order = "in order"
    warm = True

    def settings(self, job: Job) -> dict[str, Any]:
        return {"num_workers": 0}

    def make(self, job: Job) -> Iterable[Any]:
        return (np.stack([job.dataset[index] for index in batch]) for batch in job.batches)

    def peak_bytes_in_flight(self, loader: Any, job: Job) -> int:
        return job.batch_bytes

    def close(self, loader: Any) -> None:
        loader.close()


REFERENCES: tuple[Loader, ...] = (_Loop(), PyTorch("reference: pytorch num_workers=0", processes=False))


def measure(loader: Loader, job: Job, expected: Int64) -> tuple[float, float]:
    """Samples per second after the epoch's first eighth, and seconds from construction to the first batch."""
    consumer = Consumer()
    batches = -(-len(job.dataset) // job.batch_size)
    warm_up = max(1, batches // 8)
    counted = 0
    start = time.perf_counter()
    made = loader.make(job)
    for number, batch in enumerate(made):
        if number == 0:
            first_batch_s = time.perf_counter() - start
        size = consumer.read(batch)
        if number >= warm_up:
            counted += size
        else:
            clock = time.perf_counter()
    elapsed = time.perf_counter() - clock
    del batch  # views of a loader's shared memory would keep it from closing
    consumer.check(expected)
    loader.close(made)
    return counted / elapsed, first_batch_s


def loader_rows(loaders: Sequence[Loader], job: Job, repetitions: int) -> list[dict[str, Any]]:
    """A row for each loader; the loaders take turns within each repetition."""
    expected = reference(job.dataset)
    rates: dict[str, list[tuple[float, float]]] = {loader.name: [] for loader in loaders}
    errors: dict[str, str] = {}
    for repetition in range(repetitions):
        for loader in loaders:
            try:
                rates[loader.name].append(isolated(measure, loader, job, expected))
            except RuntimeError as error:
                errors[loader.name] = str(error)
                report.progress(f"{loader.name} failed:\n{error}")
                continue
            report.progress(f"{repetition + 1}/{repetitions} {loader.name}: {rates[loader.name][-1][0]:,.0f} samples/s")
    rows = [_row(loader, job, rates[loader.name], errors.get(loader.name)) for loader in loaders]
    _add_ratios(rows, loaders)
    return rows


def _row(loader: Loader, job: Job, rates: Sequence[tuple[float, float]], error: str | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "case": "trivial samples",
        "loader": loader.name,
        "order": loader.order,
        "repetitions": len(rates),
    }
    if rates:
        per_s = [rate for rate, _ in rates]
        row.update(
            samples_per_s=report.median(per_s),
            samples_per_s_spread=report.spread(per_s),
            samples_per_s_min=min(per_s),
            samples_per_s_max=max(per_s),
            first_batch_s=report.median([first for _, first in rates]),
        )
    if error is not None:
        row["error"] = error
    row["loader_settings"] = ", ".join(f"{key}={value}" for key, value in loader.settings(job).items())
    return row


def _add_ratios(rows: Sequence[dict[str, Any]], loaders: Sequence[Loader]) -> None:
    """How many times the best PyTorch's and the best SPDL's rate each row's is; None where that peer did not run."""
    for family, package in (("pytorch", "torch"), ("spdl", "spdl")):
        rates = [
            row["samples_per_s"]
            for row, loader in zip(rows, loaders, strict=True)
            if loader.package.partition(".")[0] == package and loader not in REFERENCES and "samples_per_s" in row
        ]
        for row in rows:
            known = rates and "samples_per_s" in row
            row[f"ratio_to_best_{family}"] = row["samples_per_s"] / max(rates) if known else None


@click.command(help=__doc__)
@report.command
@click.option("--loader", "wanted", multiple=True, help="Only loaders whose name contains this word; repeatable.")
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--samples", type=click.IntRange(min=1), help="Samples of one epoch.")
def main(
    json_path: str | None,
    quick: bool,
    repetitions: int | None,
    wanted: tuple[str, ...],
    workers: int,
    batch_size: int,
    samples: int | None,
) -> None:
    dataset = Trivial(samples or (2048 if quick else 131_072))
    job = Job(dataset, batch_size, workers, sample_bytes=dataset[0].nbytes)
    repetitions = repetitions or (1 if quick else 5)
    try:
        chosen = choose([*REFERENCES, *TRIVIAL], wanted)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    loaders = [loader for loader in chosen if installed(loader)]
    rows = loader_rows(loaders, job, repetitions)
    rows += scheduler_rows(repetitions, quick)
    settings = {
        "samples": len(dataset),
        "sample_bytes": job.sample_bytes,
        "batch_size": batch_size,
        "workers": workers,
        "repetitions": repetitions,
        "quick": quick,
        "not_installed": [loader.name for loader in chosen if loader not in loaders],
    }
    report.publish(report.document("overhead", settings, rows), json_path, _COLUMNS)
    if any("error" in row for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
