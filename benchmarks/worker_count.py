"""Workers between two limits (``max_workers``), beside as many as there may be from the start.

Samples take a fixed time, slept (emulated workers) or computed (real cores), and a step of training as well. Rate:
samples a second in the second half of the run; ``at_work``: workers then, on average.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import click
import torch

from benchmarks import report
from benchmarks.isolate import isolated
from benchmarks.turns import in_turns
from minato_gpu import DataLoader

BATCH = 16
LEAST, MOST = 2, 16
_ENDLESS = 1 << 20


class Samples:
    """Each takes ``seconds``, slept or (``computes``) of a core."""

    def __init__(self, seconds: float, *, computes: bool) -> None:
        self.seconds, self.computes = seconds, computes

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, key: int) -> torch.Tensor:
        if self.computes:
            end = time.thread_time() + self.seconds
            while time.thread_time() < end:
                sum(range(1000))
        else:
            time.sleep(self.seconds)
        return torch.tensor([key])


class Case(NamedTuple):
    """Seconds of a sample and of a step."""

    name: str
    sample_s: float
    step_s: float
    computes: bool


CASES = (
    Case("3 ms slept, no step", 3e-3, 0.0, computes=False),
    Case("3 ms slept, step of 10 ms", 3e-3, 10e-3, computes=False),
    Case("3 ms computed, no step", 3e-3, 0.0, computes=True),
)


@dataclass(frozen=True)
class Count:
    """How many workers there are at first, and at most."""

    least: int
    most: int

    @property
    def name(self) -> str:
        more = "" if self.most == self.least else f", max_workers={self.most}"
        return f"num_workers={self.least}{more}"


COUNTS = (Count(LEAST, LEAST), Count(LEAST, MOST), Count(MOST, MOST))


class Run(NamedTuple):
    """Of the second half."""

    samples_per_s: float
    at_work: float


def run(case: Case, count: Count, seconds: float) -> Run:
    """One loader on one case."""
    samples: Any = Samples(case.sample_s, computes=case.computes)
    loader: Any = DataLoader(samples, BATCH, num_workers=count.least, max_workers=count.most)
    begin, counted, at_work = time.perf_counter(), 0, []
    for batch in loader:
        elapsed = time.perf_counter() - begin
        if elapsed > seconds:
            break
        if elapsed > seconds / 2:
            counted += len(batch)
            at_work.append(loader.stats()["workers"].get("at_work", count.least))
        time.sleep(case.step_s)
    return Run(counted / (seconds / 2), sum(at_work) / max(1, len(at_work)))


@click.command(help=__doc__)
@report.command
@click.option("--seconds", type=click.FloatRange(min=0.1), default=20.0, show_default=True, help="For each run.")
def main(json_path: str | None, quick: bool, repetitions: int | None, seconds: float) -> None:
    cases, seconds = (CASES[:1], 1.0) if quick else (CASES, seconds)
    repetitions = repetitions or (1 if quick else 3)
    rows: list[dict[str, Any]] = []
    for case in cases:

        def measure(count: Count, case: Case = case) -> Run:
            return isolated(run, case, count, seconds, timeout_s=60 + 3 * seconds)

        runs, errors = in_turns(case.name, COUNTS, repetitions, measure, lambda one: f"{one.samples_per_s:.0f}/s")
        for count in COUNTS:
            row: dict[str, Any] = {"case": case.name, "workers": count.name}
            if found := runs[count.name]:
                row |= report.summarise("samples_per_s", [each.samples_per_s for each in found])
                row["at_work"] = report.median([each.at_work for each in found])
            rows.append(row | ({"error": errors[count.name]} if count.name in errors else {}))
    settings = {"seconds": seconds, "batch_size": BATCH, "repetitions": repetitions, "quick": quick}
    columns = ("workers", "samples_per_s", "samples_per_s_spread", "at_work", "error")
    report.publish(report.document("worker_count", settings, rows), json_path, columns)
    if any("error" in row for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
