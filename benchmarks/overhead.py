"""What a loader itself costs: samples of 12 KiB that take about a microsecond to make.

Every loader delivers the same batches to a consumer that reads every byte; one epoch, this project's loader with its
defaults, the peers at their best settings. The rate is that of the epoch after its first eighth, so that neither the
start of the workers nor what was prepared ahead before the clock started is in it.

The references take no workers at all: a bare loop over the data set, and PyTorch with ``num_workers=0``. They show
what any loader's consumer could get at most from one core, and do not count for the ratios. Then the scheduler's
decisions alone (``scheduler_cost``).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import click
import numpy as np

from benchmarks import report
from benchmarks.isolate import isolated
from benchmarks.peers import TRIVIAL, Job, Loader
from benchmarks.peers.pytorch import PyTorch
from benchmarks.scheduler_cost import scheduler_rows
from benchmarks.turns import measured_rows, present
from benchmarks.work import Consumer, Int64, Trivial, reference


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


class Run(NamedTuple):
    """Samples a second after the epoch's first eighth; seconds from construction to the first batch."""

    samples_per_s: float
    first_batch_s: float


def measure(loader: Loader, job: Job, expected: Int64) -> Run:
    """One loader, in a process of its own. Raises ContentError where a sample is lost or changed."""
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
    return Run(counted / elapsed, first_batch_s)


def with_ratios(rows: Sequence[dict[str, Any]], loaders: Sequence[Loader]) -> Iterator[dict[str, Any]]:
    """The rows with their rates over the best PyTorch's and the best SPDL's, where that peer has run."""
    best: dict[str, float] = {}
    for row, loader in zip(rows, loaders, strict=True):
        family = {"torch": "pytorch", "spdl": "spdl"}.get(loader.package.partition(".")[0])
        if family and loader not in REFERENCES and "samples_per_s" in row:
            best[family] = max(best.get(family, 0.0), row["samples_per_s"])
    for row in rows:
        ratios = {f"ratio_to_best_{family}": row["samples_per_s"] / rate for family, rate in best.items()}
        yield row | (ratios if "samples_per_s" in row else {})


@report.benchmark(
    "overhead",
    5,
    shown=(*report.columns("overhead"), "window", "samples", "scheduler_us_per_sample", "error"),
)
@report.loader_option
@report.workers_option
@click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--samples", type=click.IntRange(min=1), default=131_072, show_default=True, help="Of one epoch.")
def main(
    quick: bool, repetitions: int, wanted: Sequence[str], workers: int, batch_size: int, samples: int
) -> Iterator[dict[str, Any]]:
    dataset = Trivial(2048 if quick else samples)
    job = Job(dataset, batch_size, workers, sample_bytes=dataset[0].nbytes)
    loaders, expected = present([*REFERENCES, *TRIVIAL], wanted), reference(dataset)
    rows, _ = measured_rows(
        "trivial samples",
        loaders,
        repetitions,
        lambda loader: isolated(measure, loader, job, expected),
        lambda one: f"{one.samples_per_s:,.0f} samples/s",
    )
    yield from with_ratios(rows, loaders)
    yield from scheduler_rows(repetitions, quick)


if __name__ == "__main__":
    main()
