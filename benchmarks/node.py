"""Several loaders on one host: ranks of one job that share its cores (``max_workers="host"``); and jobs that
share a reader process (``node_share.py``), or samples (``node_prepared.py``).

Ranks wait for each other at every step; samples compute for a random time (one in twenty is forty
times slower), steps sleep, 95 % of the cores are busy. ``of_bound``: the time that the steps alone take, as a share of
the time that the run takes.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.synchronize import Barrier
from typing import Any, NamedTuple

import click
import torch

from benchmarks import report
from benchmarks.isolate import isolated, together
from benchmarks.node_prepared import prepared
from benchmarks.node_share import shared
from benchmarks.turns import Row, measured_rows
from benchmarks.work import compute
from minato_gpu import DataLoader

RANKS = CORES = 2
AHEAD = 4  # batches, for every loader
BATCH, SLOW_SHARE, SLOW_FACTOR, BUSY = 16, 0.05, 40.0, 0.95
MEAN_S = 30e-3 / 8  # of a sample
SKEWS = (1.0, 1.5)


class Samples:
    """Sample ``key`` computes for ``seconds[key]``."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, key: int) -> torch.Tensor:
        compute(self.seconds[key])
        return torch.tensor([key])


class Ranks(NamedTuple):
    """A loader for each rank. ``arguments``: beside data set and batch size."""

    name: str
    loader: Any
    arguments: dict[str, Any]


LOADERS = (
    Ranks("pytorch", torch.utils.data.DataLoader, {"num_workers": 1, "prefetch_factor": AHEAD}),
    Ranks("minato", DataLoader, {"num_workers": 1, "prefetch_factor": AHEAD}),
    Ranks("minato, max_workers=2", DataLoader, {"num_workers": 1, "max_workers": 2, "prefetch_factor": AHEAD // 2}),
    Ranks("minato, host", DataLoader, {"num_workers": 1, "max_workers": "host", "prefetch_factor": AHEAD // 2}),
)


class Run(NamedTuple):
    """The share of the bound."""

    of_bound: float


def run(ranks: Ranks, skew: float, steps: int, seed: int) -> Run:
    """Train ``steps`` steps."""
    rng, usual = random.Random(seed), MEAN_S / (1 + SLOW_SHARE * (SLOW_FACTOR - 1))
    seconds = [
        [each * (SLOW_FACTOR if rng.random() < SLOW_SHARE else 1.0) for _ in range(BATCH * steps)]
        for each in (usual * skew, *[usual] * (RANKS - 1))
    ]
    step_s = sum(map(sum, seconds)) / CORES / BUSY / steps
    return Run((steps - 1) * step_s / max(together(RANKS, _train, ranks, seconds, step_s)))


def _train(rank: int, barrier: Barrier, ranks: Ranks, all_seconds: list[list[float]], step_s: float) -> float:
    seconds = all_seconds[rank]
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_PORT": str(os.getppid())}
    torch.set_num_threads(1)
    batches = iter(ranks.loader(Samples(seconds), BATCH, **ranks.arguments))
    received = [next(batches)]
    barrier.wait()
    begin = time.perf_counter()
    for batch in batches:
        barrier.wait()
        time.sleep(step_s)
        received.append(batch)
    elapsed = time.perf_counter() - begin
    if torch.cat(received).flatten().tolist() != list(range(len(seconds))):
        raise AssertionError("samples are lost, doubled or out of order")
    return elapsed


def measured(skew: float, repetitions: int, steps: int) -> Iterator[Row]:
    """A row for each loader."""
    turns = Counter[str]()

    def measure(ranks: Ranks) -> Run:
        turns[ranks.name] += 1  # every loader has the same samples in its nth turn
        return isolated(run, ranks, skew, steps, turns[ranks.name], timeout_s=600)

    case = f"{RANKS} ranks, {CORES} cores, skew {skew}"
    for row in measured_rows(case, LOADERS, repetitions, measure)[0]:
        yield row | {"clients": RANKS}


_SHOWN = (
    *("loader", "of_bound", "of_bound_spread", "samples_per_s", "times_read", "recovery_s"),
    *("prepared_share", "cpu_s", "ratio", "error"),
)


@report.benchmark("node", 5, shown=_SHOWN, batch_size=BATCH)
@click.option("--steps", type=click.IntRange(min=4), default=100, show_default=True, help="Of each run.")
@click.option(
    "--part",
    type=click.Choice(["ranks", "share", "prepared"]),
    help="Only ranks; or jobs that share what is read, or samples.",
)
def main(quick: bool, repetitions: int, steps: int, part: str | None) -> Iterator[Row]:
    steps = 4 if quick else steps
    if part in (None, "ranks"):
        for skew in SKEWS:
            yield from measured(skew, repetitions, steps)
    if part in (None, "share"):
        yield from shared(quick=quick, repetitions=repetitions)
    if part in (None, "prepared"):
        yield from prepared(steps=steps, repetitions=repetitions)


if __name__ == "__main__":
    main()
