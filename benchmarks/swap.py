"""What changing the import brings where few samples are slow, on README's first screen: ``python -m benchmarks.swap``.

1,600 samples in batches of 16, in the sampler's shuffled order. A sample takes 5 ms, every 50th of the data set 500 ms:
they sleep, so that eight workers need no eight cores. The training step is emulated by a sleep of 40 ms: no loader can
be through with an epoch before 4.0 s. Both loaders have the same arguments (``persistent_workers``, 8 workers), and
take turns, each in a fresh process. The second epoch counts; the first one, in which workers start and nothing is
known of any sample, stands beside it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import click
import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader

import minato_gpu
from benchmarks import report
from benchmarks.isolate import isolated
from benchmarks.turns import in_turns

WORKERS, BATCH, STEP_S = 8, 16, 0.04
SAMPLES, USUAL_S, SLOW_S, EVERY = 1600, 5e-3, 0.5, 50

_COLUMNS = ("loader", "epoch_s", "epoch_spread_s", "wait_p99_ms", "first_epoch_s", "first_wait_p99_ms", "error")


class FewAreSlow:
    """A data set: an item is its number, after 5 ms, or of every 50th 500 ms."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> int:
        time.sleep(SLOW_S if index % EVERY == 0 else USUAL_S)
        return index


@dataclass(frozen=True)
class Contender:
    """A loader class with its ``in_order``."""

    name: str
    kind: Any
    in_order: bool


CONTENDERS = tuple(
    Contender(f"{name}, {'in order' if in_order else 'out of order'}", kind, in_order)
    for in_order in (True, False)
    for name, kind in (("PyTorch", TorchDataLoader), ("minato_gpu", minato_gpu.DataLoader))
)


class Epoch(NamedTuple):
    """Seconds of an epoch, and what each ``next`` took."""

    seconds: float
    waits_s: list[float]

    @property
    def p99_s(self) -> float:
        """The longest wait but for one in a hundred."""
        return float(np.percentile(self.waits_s, 99))


def epochs(contender: Contender, samples: int) -> list[Epoch]:
    """Two epochs. Raises RuntimeError where a sample did not come exactly once."""
    loader = contender.kind(
        FewAreSlow(samples),
        batch_size=BATCH,
        shuffle=True,
        num_workers=WORKERS,
        persistent_workers=True,
        in_order=contender.in_order,
        generator=torch.Generator().manual_seed(0),
    )
    return [_epoch(loader, samples) for _ in range(2)]


def _epoch(loader: Any, samples: int) -> Epoch:
    begin, waits, came, batches = time.perf_counter(), list[float](), list[int](), iter(loader)
    while True:
        asked = time.perf_counter()
        batch = next(batches, None)
        waits.append(time.perf_counter() - asked)
        if batch is None:
            break
        time.sleep(STEP_S)
        came += batch.tolist()
    if sorted(came) != list(range(samples)):
        raise RuntimeError("not every sample came exactly once")
    return Epoch(time.perf_counter() - begin, waits[:-1])


def _row(contender: Contender, runs: Sequence[list[Epoch]], error: str | None) -> dict[str, Any]:
    row: dict[str, Any] = {"loader": contender.name, "repetitions": len(runs)}
    if runs:
        first, second = zip(*runs, strict=True)
        row |= report.summarise("epoch", [each.seconds for each in second], "_s")
        row["wait_p99_ms"] = 1e3 * report.median([each.p99_s for each in second])
        row["first_epoch_s"] = report.median([each.seconds for each in first])
        row["first_wait_p99_ms"] = 1e3 * report.median([each.p99_s for each in first])
    return row if error is None else {**row, "error": error}


@click.command(help=__doc__)
@report.command
def main(json_path: str | None, quick: bool, repetitions: int | None) -> None:
    samples = 4 * BATCH if quick else SAMPLES
    repetitions = repetitions or (1 if quick else 5)
    measure = partial(_measured, samples)
    runs, errors = in_turns("swap", CONTENDERS, repetitions, measure, lambda found: f"{found[1].seconds:.2f} s")
    rows = [_row(each, runs[each.name], errors.get(each.name)) for each in CONTENDERS]
    settings = {"workers": WORKERS, "batch": BATCH, "samples": samples, "step_s": STEP_S, "work": "samples that sleep"}
    report.publish(report.document("swap", {**settings, "repetitions": repetitions}, rows), json_path, _COLUMNS)
    if errors:
        raise SystemExit(1)


def _measured(samples: int, contender: Contender) -> list[Epoch]:
    return isolated(epochs, contender, samples)


if __name__ == "__main__":
    main()
