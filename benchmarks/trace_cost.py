"""What ``trace=`` costs: epochs with and without it, in pairs that take turns.

    without, with     samples a second of an epoch after its first eighth
    ratio             of each pair, with by without: the median, and the middle half
    cpu_us            more CPU of the training process with it, a sample: the median of the pairs
    bytes_per_sample  that the trace takes

Two workers, batches of 64. ``trivial``: 12 KiB that take a microsecond to make, in order: the most that there is to be
told in a second. ``computed``: 2 ms of computing each. ``slept``: 3 ms that are slept on 8 workers (more than there are
cores: emulated). And the four workloads: their files, their pipelines, batches of 16 at most.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import Any, NamedTuple

import click
import numpy as np

from benchmarks import report
from benchmarks.compare.workloads import job
from benchmarks.datasets import Costly, Trivial
from benchmarks.isolate import isolated
from benchmarks.whatif_run import written
from benchmarks.work import calibrate
from minato_gpu import DataLoader

_COLUMNS = (
    *("case", "without_per_s", "with_per_s", "ratio", "ratio_low", "ratio_high"),
    *("cpu_us", "bytes_per_sample", "pairs"),
)
BATCH = 64
SIZES = {"image_classification": 1152, "object_detection": 480, "segmentation_3d": 128, "speech_recognition": 192}
_NAMES = "trivial", "computed", "slept", *SIZES


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
    batch: int = BATCH
    collate: Callable[[list[Any]], Any] | None = None


def cases(folder: Path, names: tuple[str, ...], *, quick: bool) -> Iterator[Case]:
    """At toy size, or so that an epoch takes two seconds or more."""
    few = 512 if quick else None
    if "trivial" in names:
        yield Case("trivial", Trivial(few or 120_000), 2)
    if "computed" in names:
        yield Case("computed", Costly(np.full(few or 2_000, round(2 * calibrate())), 1536), 2)
    if "slept" in names:
        yield Case("slept", Slept(few or 5_000), 8)
    for name in SIZES:
        if name not in names:
            continue
        data = isolated(written, name, folder, 24 if quick else SIZES[name], report.progress, timeout_s=600.0)
        work = job(name, data.folder, 2)
        yield Case(name, work.dataset, work.workers, data.batch, work.collate)


def measure(case: Case, trace: Path | None) -> tuple[float, float]:
    """Samples a second, and CPU seconds of this process for each."""
    loader: Any = DataLoader(case.dataset, case.batch, num_workers=case.workers, collate_fn=case.collate, trace=trace)
    counted_from, since, cpu = -(-len(case.dataset) // case.batch) // 8, 0.0, process_time()
    for number, _ in enumerate(loader):
        if number == counted_from:
            since = perf_counter()
    counted = len(case.dataset) - (counted_from + 1) * case.batch
    return counted / (perf_counter() - since), (process_time() - cpu) / len(case.dataset)


def row(case: Case, pairs: int) -> dict[str, Any]:
    """One measured; which of a pair goes first takes turns."""
    without, traced, nbytes = list[tuple[float, float]](), list[tuple[float, float]](), 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.pftrace"
        for pair in range(pairs):
            for with_trace in (pair % 2 == 0, pair % 2 == 1):
                found = isolated(measure, case, path if with_trace else None)
                (traced if with_trace else without).append(found)
            nbytes = path.stat().st_size
            report.progress(f"{case.name}: pair {pair + 1} of {pairs}: {traced[-1][0] / without[-1][0]:.4f}")
    pairs_of = list(zip(without, traced, strict=True))
    ratios = [traced[0] / without[0] for without, traced in pairs_of]
    return {
        "case": case.name,
        "without_per_s": report.median([rate for rate, _ in without]),
        "with_per_s": report.median([rate for rate, _ in traced]),
        "ratio": report.median(ratios),
        "ratio_low": float(np.percentile(ratios, 25)),
        "ratio_high": float(np.percentile(ratios, 75)),
        "cpu_us": 1e6 * report.median([traced[1] - without[1] for without, traced in pairs_of]),
        "bytes_per_sample": nbytes / len(case.dataset),
        "pairs": pairs,
    }


@click.command(help=__doc__)
@report.command
@click.option("--case", "names", multiple=True, type=click.Choice(_NAMES), help="Only this; repeatable.")
def main(json_path: str | None, quick: bool, repetitions: int | None, names: tuple[str, ...]) -> None:
    pairs = repetitions or (2 if quick else 30)
    names = names or (_NAMES[:4] if quick else _NAMES)
    with tempfile.TemporaryDirectory() as folder:
        rows = [row(case, pairs) for case in cases(Path(folder), names, quick=quick)]
    report.publish(report.document("trace_cost", {"pairs": pairs, "quick": quick}, rows), json_path, _COLUMNS)


if __name__ == "__main__":
    main()
