"""Several loaders on one host: ranks of one job that share its cores (``max_workers="host"``); and jobs that
share a reader process (``node_share.py``), or samples (``node_prepared.py``).

Ranks wait for each other at every step; samples compute for a random time (one in twenty is forty
times slower), steps sleep, 95 % of the cores are busy. ``of_bound``: the time that the steps alone take, as a share of
the time that the run takes.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from typing import Any, NamedTuple

import click
import torch

from benchmarks import report
from benchmarks.isolate import isolated
from benchmarks.node_prepared import prepared
from benchmarks.node_share import shared
from benchmarks.turns import Row, measured_rows
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
        end = time.thread_time() + self.seconds[key]
        while time.thread_time() < end:
            hashlib.blake2b(b"x" * 2000).digest()
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


def costs(count: int, mean_s: float, rng: random.Random) -> list[float]:
    """Seconds of ``count`` samples: one in twenty is forty times slower."""
    usual = mean_s / (1 + SLOW_SHARE * (SLOW_FACTOR - 1))
    return [usual * (SLOW_FACTOR if rng.random() < SLOW_SHARE else 1.0) for _ in range(count)]


class Run(NamedTuple):
    """The share of the bound."""

    of_bound: float


def run(ranks: Ranks, skew: float, steps: int, seed: int) -> Run:
    """Train ``steps`` steps."""
    rng = random.Random(seed)
    seconds = [costs(BATCH * steps, MEAN_S * (skew if rank == 0 else 1.0), rng) for rank in range(RANKS)]
    step_s = sum(map(sum, seconds)) / CORES / BUSY / steps
    context = multiprocessing.get_context("fork")
    barrier, found = context.Barrier(RANKS), context.Queue()
    started = [
        context.Process(target=_train, args=(ranks, rank, seconds[rank], step_s, barrier, found))
        for rank in range(RANKS)
    ]
    for process in started:
        process.start()
    elapsed = max(found.get() for _ in started)
    for process in started:
        process.join()
    return Run((steps - 1) * step_s / elapsed)


def _train(ranks: Ranks, rank: int, seconds: list[float], step_s: float, barrier: Barrier, found: Queue[float]) -> None:
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
    found.put(elapsed)


def measured(skew: float, repetitions: int, steps: int) -> Iterator[Row]:
    """A row for each loader."""
    turns = Counter[str]()

    def measure(ranks: Ranks) -> Run:
        turns[ranks.name] += 1  # every loader has the same samples in its nth turn
        return isolated(run, ranks, skew, steps, turns[ranks.name], timeout_s=600)

    case = f"{RANKS} ranks, {CORES} cores, skew {skew}"
    for row in measured_rows(case, LOADERS, repetitions, measure, lambda found: f"{found.of_bound:.3f} of the bound")[
        0
    ]:
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
