"""What ``trace=`` costs: epochs with and without it, in pairs that take turns.

    without, with     samples a second of an epoch after its first eighth, two workers, batches of 64
    ratio             of each pair, with by without: the median, and the middle half
    bytes_per_sample  that the trace takes

``trivial``: 12 KiB that take a microsecond to make, in order: the most that there is to be told in a second.
``computed``: 2 ms of computing each. ``slept``: 3 ms that are slept on 8 workers (more than there are cores: emulated).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, NamedTuple

import click
import numpy as np

from benchmarks import report
from benchmarks.datasets import Costly, Trivial
from benchmarks.isolate import isolated
from benchmarks.work import calibrate
from minato_gpu import DataLoader

_COLUMNS = ("case", "without_per_s", "with_per_s", "ratio", "ratio_low", "ratio_high", "bytes_per_sample", "pairs")
BATCH = 64


class Slept:
    """Arrays of 12 KiB after three milliseconds' sleep."""

    def __init__(self, samples: int) -> None:
        self._inner = Trivial(samples)

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, index: int) -> Any:
        sleep(3e-3)
        return self._inner[index]


class Case(NamedTuple):
    """What is loaded, and by how many workers."""

    name: str
    dataset: Any
    workers: int


def cases(quick: bool) -> list[Case]:
    """At toy size, or so that an epoch takes two seconds or so."""
    few = 512 if quick else None
    operations = round(2 * calibrate())
    return [
        Case("trivial", Trivial(few or 120_000), 2),
        Case("computed", Costly(np.full(few or 2_000, operations), 1536), 2),
        Case("slept", Slept(few or 5_000), 8),
    ]


def measure(case: Case, trace: Path | None) -> float:
    """Samples a second."""
    loader: Any = DataLoader(case.dataset, BATCH, num_workers=case.workers, trace=trace)
    batches = -(-len(case.dataset) // BATCH)
    since, counted = 0.0, 0
    for number, batch in enumerate(loader):
        if number >= batches // 8:
            counted += len(batch) if since else 0
            since = since or perf_counter()
    return counted / (perf_counter() - since)


def row(case: Case, pairs: int) -> dict[str, Any]:
    """One measured; which of a pair goes first takes turns."""
    without, traced, nbytes = list[float](), list[float](), 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.pftrace"
        for pair in range(pairs):
            for with_trace in (pair % 2 == 0, pair % 2 == 1):
                rate = isolated(measure, case, path if with_trace else None)
                (traced if with_trace else without).append(rate)
            nbytes = path.stat().st_size
            report.progress(f"{case.name}: pair {pair + 1} of {pairs}: {traced[-1] / without[-1]:.4f}")
    ratios = _ratios(without, traced)
    return {
        "case": case.name,
        "without_per_s": report.median(without),
        "with_per_s": report.median(traced),
        "ratio": report.median(ratios),
        "ratio_low": float(np.percentile(ratios, 25)),
        "ratio_high": float(np.percentile(ratios, 75)),
        "bytes_per_sample": nbytes / len(case.dataset),
        "pairs": pairs,
    }


def _ratios(without: Sequence[float], traced: Sequence[float]) -> list[float]:
    return [each / other for each, other in zip(traced, without, strict=True)]


@click.command(help=__doc__)
@report.command
def main(json_path: str | None, quick: bool, repetitions: int | None) -> None:
    pairs = repetitions or (2 if quick else 30)
    rows = [row(case, pairs) for case in cases(quick)]
    report.publish(report.document("trace_cost", {"pairs": pairs, "quick": quick}, rows), json_path, _COLUMNS)


if __name__ == "__main__":
    main()
