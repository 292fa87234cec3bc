"""A data set of 100 million indices: how many bytes the loader holds for each, and how long it takes to start.

The sampler's own cost is measured first, alone in a fresh process (a batch sampler whose first batch has been drawn),
and taken off: ``start_beyond_sampler_s`` from construction to the first batch, ``held_bytes_per_index`` in memory that
is really there (proportional set size of all processes, so that pages shared by forked workers count once), and
``reserved_bytes_per_index`` in private address space of the training process, which also counts tables that are
filled only as the epoch goes on. Two hundred batches have been delivered when memory is read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sized
from itertools import islice
from pathlib import Path
from typing import Any

import click
import psutil
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from benchmarks import report
from benchmarks.datasets import Trivial
from benchmarks.isolate import MeasurementError, isolated
from benchmarks.peers import Loader, installed
from benchmarks.peers.minato import Minato, constructor
from benchmarks.peers.pytorch import PyTorch

LOADERS: tuple[Loader, ...] = (
    PyTorch("pytorch in order"),
    Minato("minato_gpu in order"),
    Minato("minato_gpu bounded", in_order=False),
)
SAMPLERS: dict[str, type[Sampler[int]]] = {"sequential": SequentialSampler, "random": RandomSampler}
_BATCH = 64
_BATCHES = 200
_WORDS = 2
_COLUMNS = (
    "sampler",
    "loader",
    "indices",
    "sampler_s",
    "start_s",
    "start_beyond_sampler_s",
    "sampler_bytes_per_index",
    "held_bytes_per_index",
    "reserved_bytes_per_index",
    "error",
)


class Memory:
    """Bytes of this process and its descendants, counted from construction on."""

    def __init__(self) -> None:
        self._held, self._reserved = _held_bytes(), _reserved_bytes()

    def grown(self) -> tuple[int, int]:
        """Bytes held (all processes) and reserved (this process) since construction."""
        return _held_bytes() - self._held, _reserved_bytes() - self._reserved


def measure_sampler(sampler: str, indices: int) -> tuple[float, int, int]:
    """Seconds until the sampler alone has drawn its first batch; bytes that it holds and reserves then."""
    dataset: Sized = Trivial(indices, _WORDS)
    memory = Memory()
    start = time.perf_counter()
    batches = iter(BatchSampler(SAMPLERS[sampler](dataset), _BATCH, drop_last=False))  # type: ignore[call-arg]
    next(batches)
    return time.perf_counter() - start, *memory.grown()


def measure_loader(loader: Loader, sampler: str, indices: int) -> tuple[float, int, int]:
    """Seconds from construction to the first batch; bytes held and reserved after some batches."""
    dataset = Trivial(indices, _WORDS)
    memory = Memory()
    start = time.perf_counter()
    made = iter(_constructor(loader)(dataset, sampler=SAMPLERS[sampler](dataset), **_arguments(loader)))  # type: ignore[call-arg]
    next(made)
    started = time.perf_counter() - start
    for _ in islice(made, _BATCHES):
        pass
    return started, *memory.grown()


def rows(samplers: list[str], loaders: list[Loader], indices: int, repetitions: int) -> list[dict[str, Any]]:
    """A row for each sampler and loader; medians over the repetitions, in which they take turns."""
    found: dict[tuple[str, str], list[tuple[float, int, int]]] = {}
    errors: dict[tuple[str, str], str] = {}
    for _ in range(repetitions):
        for sampler in samplers:
            found.setdefault((sampler, ""), []).append(isolated(measure_sampler, sampler, indices))
            for loader in loaders:
                key = (sampler, loader.name)
                try:
                    found.setdefault(key, []).append(isolated(measure_loader, loader, sampler, indices))
                except MeasurementError as error:
                    errors[key] = str(error)
                    report.progress(f"{sampler}, {loader.name} failed:\n{error}")
    made = []
    for sampler in samplers:
        alone = [report.median(values) for values in zip(*found[sampler, ""], strict=True)]
        for loader in loaders:
            key = (sampler, loader.name)
            made.append(_row(sampler, loader, indices, alone, found.get(key, []), errors.get(key)))
    return made


def _row(
    sampler: str,
    loader: Loader,
    indices: int,
    alone: list[float],
    runs: list[tuple[float, int, int]],
    error: str | None,
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "sampler": sampler,
        "loader": loader.name,
        "indices": indices,
        "sampler_s": alone[0],
        "sampler_bytes_per_index": alone[1] / indices,
        "repetitions": len(runs),
    }
    if runs:
        start_s, held, reserved = (report.median(values) for values in zip(*runs, strict=True))
        row |= {
            "start_s": start_s,
            "start_spread_s": report.spread([run[0] for run in runs]),
            "start_beyond_sampler_s": start_s - alone[0],
            "held_bytes_per_index": (held - alone[1]) / indices,
            "reserved_bytes_per_index": (reserved - alone[2]) / indices,
        }
    if error is not None:
        row["error"] = error
    return row


def _constructor(loader: Loader) -> Any:
    return constructor() if isinstance(loader, Minato) else DataLoader


def _arguments(loader: Loader) -> dict[str, Any]:
    arguments: dict[str, Any] = {"batch_size": _BATCH, "num_workers": 2, "persistent_workers": True}
    if loader.order != "in order":
        arguments["in_order"] = False
    return arguments


def _held_bytes() -> int:
    """Proportional set size of this process and its descendants. Linux only."""
    this = psutil.Process()
    total = 0
    for process in (this, *this.children(recursive=True)):
        total += _field(Path(f"/proc/{process.pid}/smaps_rollup"), "Pss:")
    return total


def _reserved_bytes() -> int:
    """Private address space of this process, touched or not. Linux only."""
    return _field(Path(f"/proc/{os.getpid()}/status"), "VmData:")


def _field(path: Path, name: str) -> int:
    for line in path.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    raise ValueError(f"{path.name} has no field {name}")


@click.command(help=__doc__)
@report.command
@click.option("--indices", type=click.IntRange(min=1), help="Length of the data set.")
@click.option(
    "--sampler", "samplers", multiple=True, type=click.Choice(list(SAMPLERS)), help="Repeatable; all, if none."
)
def main(
    json_path: str | None, quick: bool, repetitions: int | None, indices: int | None, samplers: tuple[str, ...]
) -> None:
    indices = indices or (100_000 if quick else 100_000_000)
    repetitions = repetitions or (1 if quick else 3)
    loaders = [loader for loader in LOADERS if installed(loader)]
    found = rows(list(samplers or SAMPLERS), loaders, indices, repetitions)
    settings = {
        "indices": indices,
        "batch_size": _BATCH,
        "workers": 2,
        "batches_delivered": _BATCHES + 1,
        "repetitions": repetitions,
        "quick": quick,
        "not_installed": [loader.name for loader in LOADERS if loader not in loaders],
    }
    report.publish(report.document("large", settings, found), json_path, _COLUMNS)
    if any("error" in row for row in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
