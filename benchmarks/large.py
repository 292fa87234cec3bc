"""A data set of 100 million indices: how many bytes the loader holds for each, and how long it takes to start.

The sampler's own cost is measured first, alone in a fresh process (a batch sampler whose first batch has been drawn),
and taken off: ``start_beyond_sampler_s`` from construction to the first batch, ``held_bytes_per_index`` in memory that
is really there (proportional set size of all processes, so that pages shared by forked workers count once), and
``reserved_bytes_per_index`` in private address space of the training process, which also counts tables that are
filled only as the epoch goes on. Two hundred batches have been delivered when memory is read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import click
import torch.utils.data as torch_data

from benchmarks import report
from benchmarks.isolate import isolated, reserved_bytes, tree_pss_bytes
from benchmarks.turns import measured_rows
from benchmarks.work import Trivial
from minato_gpu import DataLoader

SAMPLERS: dict[str, Any] = {"sequential": torch_data.SequentialSampler, "random": torch_data.RandomSampler}
_BATCH, _BATCHES, _WORDS = 64, 200, 2


class Way(NamedTuple):
    """A loader, or the sampler alone."""

    name: str
    loader: Any
    in_order: bool = True


ALONE = Way("sampler alone", None)
LOADERS = (
    Way("pytorch in order", torch_data.DataLoader),
    Way("minato_gpu in order", DataLoader),
    Way("minato_gpu bounded", DataLoader, in_order=False),
)


class Run(NamedTuple):
    """Until the first batch; then, after some batches, held by all processes and reserved by this one."""

    start_s: float
    held_bytes: int
    reserved_bytes: int


def run(way: Way, sampler: str, indices: int) -> Run:
    """One loader, or the sampler alone, in a process of its own."""
    dataset: Any = Trivial(indices, _WORDS)
    held, reserved = tree_pss_bytes(), reserved_bytes()
    start = time.perf_counter()
    if way.loader is None:
        made: Any = iter(torch_data.BatchSampler(SAMPLERS[sampler](dataset), _BATCH, drop_last=False))
    else:
        common = {"batch_size": _BATCH, "num_workers": 2, "persistent_workers": True, "in_order": way.in_order}
        made = iter(way.loader(dataset, sampler=SAMPLERS[sampler](dataset), **common))
    next(made)
    started = time.perf_counter() - start
    for _ in islice(made, 0 if way.loader is None else _BATCHES):
        pass
    return Run(started, tree_pss_bytes() - held, reserved_bytes() - reserved)


@report.benchmark("large", 3, batch_size=_BATCH, workers=2, batches_delivered=_BATCHES + 1)
@click.option("--indices", type=click.IntRange(min=1), default=100_000_000, show_default=True, help="Of the data set.")
@click.option(
    "--sampler", "samplers", multiple=True, type=click.Choice(list(SAMPLERS)), help="Repeatable; all, if none."
)
def main(quick: bool, repetitions: int, indices: int, samplers: Sequence[str]) -> Iterator[dict[str, Any]]:
    indices = 100_000 if quick else indices
    for sampler in samplers or SAMPLERS:

        def measure(way: Way, sampler: str = sampler) -> Run:
            return isolated(run, way, sampler, indices)

        (alone, *rows), _ = measured_rows(
            sampler,
            (ALONE, *LOADERS),
            repetitions,
            measure,
            lambda one: f"{one.held_bytes / indices:.2f} bytes an index",
        )
        for row in rows:
            row |= {"sampler": sampler, "indices": indices, "sampler_s": alone.get("start_s")}
            if "start_s" in row and "start_s" in alone:
                row["start_beyond_sampler_s"] = row["start_s"] - alone["start_s"]
                for name in ("held", "reserved"):
                    row[f"{name}_bytes_per_index"] = (row[f"{name}_bytes"] - alone[f"{name}_bytes"]) / indices
            yield row


if __name__ == "__main__":
    main()
