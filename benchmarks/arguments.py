"""What an argument of this loader brings or costs: loaders with and without it take turns on the same samples.

    samples_per_s   in the second half of so many seconds from the first batch on
    cpu_us          CPU microseconds of the training process for each sample
    at_work         workers then, on average
    ratio           the rate by that of the first in the list, pair by pair, with its 95 % interval

``trivial``: 12 KiB that take a microsecond to make: the most events a second that a trace can get.
``computed``: milliseconds of work. ``slept``: milliseconds that are slept, on more workers than there are cores.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from benchmarks import report
from benchmarks.isolate import isolated
from benchmarks.turns import cases_called, measured_rows, ratio_columns
from benchmarks.work import Costly, Slept, Trivial, calibrate
from minato_gpu import DataLoader

BATCH = 16
_MANY = 1 << 20  # samples: no run comes to the end


class Way(NamedTuple):
    """A loader's arguments. A path to write to is one in a folder of the run."""

    name: str
    arguments: Mapping[str, Any]


def _with_and_without(name: str, value: Any, workers: int) -> tuple[Way, ...]:
    return Way("without", {"num_workers": workers}), Way(f"with {name}", {"num_workers": workers, name: value})


def _between(least: int, most: int) -> tuple[Way, ...]:
    return (
        Way(f"num_workers={least}", {"num_workers": least}),
        Way(f"num_workers={least}, max_workers={most}", {"num_workers": least, "max_workers": most}),
        Way(f"num_workers={most}", {"num_workers": most}),
    )


class Case(NamedTuple):
    """Samples, the ways to load them, and what the consumer sleeps for a batch."""

    name: str
    samples: Callable[[], Any]
    ways: tuple[Way, ...]
    step_s: float = 0.0


def trivial() -> Any:
    """Samples of 12 KiB that take a microsecond."""
    return Trivial(_MANY)


def computed(milliseconds: float) -> Any:
    """Samples that compute for so long."""
    return Costly(np.full(_MANY, round(milliseconds * calibrate())), 2)


def slept(milliseconds: float) -> Any:
    """Samples that sleep for so long."""
    return Slept(np.full(_MANY, milliseconds / 1e3), 2)


_TRACE = Path("run.pftrace")
CASES = (
    Case("trace, trivial", trivial, _with_and_without("trace", _TRACE, 2)),
    Case("trace, 2 ms computed", lambda: computed(2.0), _with_and_without("trace", _TRACE, 2)),
    Case("trace, 3 ms slept", lambda: slept(3.0), _with_and_without("trace", _TRACE, 8)),
    Case("max_workers, 3 ms slept", lambda: slept(3.0), _between(2, 16)),
    Case("max_workers, 3 ms slept, step of 10 ms", lambda: slept(3.0), _between(2, 16), 10e-3),
    Case("max_workers, 3 ms computed", lambda: computed(3.0), _between(2, 16)),
)


class Run(NamedTuple):
    """Of the second half: see the head of this module."""

    samples_per_s: float
    cpu_us: float
    at_work: float


def run(case: Case, way: Way, seconds: float) -> Run:
    """One loader, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        arguments: dict[str, Any] = {
            key: Path(folder) / it if isinstance(it, Path) else it for key, it in way.arguments.items()
        }
        loader: Any = DataLoader(case.samples(), BATCH, **arguments)
        begin = clock = cpu_s = 0.0
        counted, at_work = 0, list[int]()
        for batch in loader:
            now = time.perf_counter()
            begin = begin or now
            if now > begin + seconds:
                break
            if clock:
                counted += len(batch)
                at_work.append(loader.stats()["workers"].get("at_work", way.arguments["num_workers"]))
            elif now > begin + seconds / 2:
                clock, cpu_s = now, time.process_time()
            time.sleep(case.step_s)
        cpu_us = 1e6 * (time.process_time() - cpu_s) / counted
    return Run(counted / (now - clock), cpu_us, sum(at_work) / len(at_work))


@report.benchmark("arguments", 10, batch_size=BATCH)
@report.case_option
@click.option("--seconds", type=click.FloatRange(min=0.1), default=10.0, show_default=True, help="For each run.")
def main(quick: bool, repetitions: int, names: Sequence[str], seconds: float) -> Iterator[dict[str, Any]]:
    seconds = 1.0 if quick else seconds
    for case in cases_called(CASES, names):

        def measure(way: Way, case: Case = case) -> Run:
            return isolated(run, case, way, seconds, timeout_s=60 + 3 * seconds)

        rows, runs = measured_rows(case.name, case.ways, repetitions, measure, lambda one: f"{one.samples_per_s:.0f}/s")
        first, *_ = ([one.samples_per_s for one in some] for some in runs.values())
        for row, some in zip(rows, runs.values(), strict=True):
            rates = [one.samples_per_s for one in some]
            yield row | (ratio_columns("ratio", rates, first) if first and len(rates) == len(first) else {})


if __name__ == "__main__":
    main()
