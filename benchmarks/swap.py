"""What changing the import brings where few samples are slow, on README's first screen.

1,600 samples in batches of 16, in the sampler's shuffled order. A sample takes 5 ms, every 50th of the data set 500 ms:
they sleep, so that eight workers need no eight cores. The training step is emulated by a sleep of 40 ms: no loader can
be through with an epoch before 4.0 s. Both loaders have the same arguments (``persistent_workers``, 8 workers), and
take turns, each in a fresh process. The second epoch counts; the first one, in which workers start and nothing is
known of any sample, stands beside it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader

import minato_gpu
from benchmarks import report
from benchmarks.isolate import isolated
from benchmarks.turns import measured_rows
from benchmarks.work import Slept

WORKERS, BATCH, STEP_S = 8, 16, 0.04
SAMPLES, USUAL_S, SLOW_S, EVERY = 1600, 5e-3, 0.5, 50


class Contender(NamedTuple):
    """A loader class with its ``in_order``."""

    name: str
    kind: Any
    in_order: bool


CONTENDERS = tuple(
    Contender(f"{name}, {'in order' if in_order else 'out of order'}", kind, in_order)
    for in_order in (True, False)
    for name, kind in (("PyTorch", TorchDataLoader), ("minato_gpu", minato_gpu.DataLoader))
)


class Run(NamedTuple):
    """Seconds of the second epoch and the 99th percentile of the waits for its batches; the same of the first."""

    epoch_s: float
    wait_p99_ms: float
    first_epoch_s: float
    first_wait_p99_ms: float


def run(contender: Contender, samples: int) -> Run:
    """Two epochs. Raises RuntimeError where a sample did not come exactly once."""
    seconds = np.full(samples, USUAL_S)
    seconds[::EVERY] = SLOW_S
    loader = contender.kind(
        Slept(seconds, words=1),
        batch_size=BATCH,
        shuffle=True,
        num_workers=WORKERS,
        persistent_workers=True,
        in_order=contender.in_order,
        generator=torch.Generator().manual_seed(0),
    )
    first, second = _epoch(loader, samples), _epoch(loader, samples)
    return Run(*second, *first)


def _epoch(loader: Any, samples: int) -> tuple[float, float]:
    begin, waits, came, batches = time.perf_counter(), list[float](), list[int](), iter(loader)
    while True:
        asked = time.perf_counter()
        batch = next(batches, None)
        waits.append(time.perf_counter() - asked)
        if batch is None:
            break
        time.sleep(STEP_S)
        came += batch[:, 0].tolist()
    if sorted(came) != list(range(samples)):
        raise RuntimeError("not every sample came exactly once")
    return time.perf_counter() - begin, 1e3 * float(np.percentile(waits[:-1], 99))


@report.benchmark("swap", 5, workers=WORKERS, batch=BATCH, samples=SAMPLES, step_s=STEP_S, work="samples that sleep")
def main(quick: bool, repetitions: int) -> Iterable[dict[str, Any]]:
    samples = 4 * BATCH if quick else SAMPLES
    return measured_rows("swap", CONTENDERS, repetitions, lambda contender: isolated(run, contender, samples))[0]


if __name__ == "__main__":
    main()
