"""Many runs of chaos: several at a time, into a document that an interrupted command goes on with.

A row is known by its seed. A document is one of the package's and the runs' own sources, by a digest of them: rows of
other sources would say nothing about these, and are not thrown away either.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks import report
from benchmarks.chaos_plan import FAULTS
from minato_gpu.notices import LOGGER
from minato_gpu.report import write

Row = dict[str, Any]
_EVERY = 10  # runs between two writes of the document
_ROOT = Path(__file__).resolve().parent.parent
_TOLD = (
    *("samples_failed", "samples_repeated", "batches_delivered"),
    *("workers_died", "workers_hung", "workers_replaced"),
)


def sources() -> str:
    """A digest of all that decides what a run does."""
    files = [*(_ROOT / "minato_gpu").rglob("*.py"), *(_ROOT / "benchmarks").glob("chaos*.py")]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def known_rows(path: Path | None) -> dict[int, Row]:
    """The rows of a document that is gone on with, by seed. Raises click.UsageError for one that is another's."""
    if path is None or not path.exists():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        found, rows = document["settings"]["sources"], {row["seed"]: row for row in document["rows"]}
    except (ValueError, KeyError, TypeError) as error:
        raise click.UsageError(f"{path} is there, and is no document of this command; give another path") from error
    if found != sources():
        raise click.UsageError(
            f"{path} has runs of other sources ({found}, these are {sources()}); move it away, or give another path"
        )
    return rows


def document(rows: Mapping[int, Row]) -> dict[str, Any]:
    """All rows, what was injected in them, and how many lost anything."""
    ordered = [rows[seed] for seed in sorted(rows)]
    settings = {
        "sources": sources(),
        "seeds": len(rows),
        "first_seed": min(rows, default=None),
        "injected": injected(ordered),
        "runs_with_losses": sum(bool(row["broken"]) for row in ordered),
    }
    return report.document("chaos", settings, ordered)


def injected(rows: Iterable[Row]) -> dict[str, int]:
    """How often each fault was."""
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row["injected"])
    return {kind: total[kind] for kind in FAULTS}


def summary(rows: Mapping[int, Row]) -> list[dict[str, Any]]:
    """What was injected, what came of it, and what was lost, a line each."""
    lines: list[dict[str, Any]] = [
        {"fault": kind, "injected": count} for kind, count in injected(rows.values()).items()
    ]
    lines += [{"fault": name.replace("_", " "), "counted": _sum(rows, name)} for name in ("delivered", *_TOLD)]
    lines.append({"fault": "runs with anything lost", "lost": sum(bool(row["broken"]) for row in rows.values())})
    for seed, row in sorted(rows.items()):
        lines += [{"fault": f"seed {seed}: {words}", "lost": 1} for words in row["broken"]]
    return lines


def _sum(rows: Mapping[int, Row], name: str) -> int:
    return sum(row.get(name, 0) for row in rows.values())


def quietly() -> None:
    """What each process is told first: every death is a warning, and torch's threads would be in each other's way."""
    LOGGER.setLevel(logging.ERROR)
    torch.set_num_threads(1)


def _begin_process() -> None:
    """A process of the pool, which is spawned and would have its loaders spawn their workers, too."""
    multiprocessing.set_start_method("fork", force=True)
    quietly()


def run_all(run: Callable[[int], Row], seeds: list[int], processes: int) -> Iterator[Row]:
    """The rows of these seeds as they come, ``processes`` at a time."""
    if processes == 1:
        yield from map(run, seeds)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _begin_process) as pool:
        try:
            yield from (future.result() for future in as_completed([pool.submit(run, seed) for seed in seeds]))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def record(run: Callable[[int], Row], seeds: Iterable[int], processes: int, path: Path | None) -> dict[int, Row]:
    """Run what ``path`` does not have, and keep that up to date; returns the rows of all."""
    rows = known_rows(path)
    wanted = [seed for seed in seeds if seed not in rows]
    if rows:
        report.progress(f"{len(rows)} runs are there already; {len(wanted)} are left")
    unwritten = 0
    try:
        for count, row in enumerate(run_all(run, wanted, processes), start=1):
            rows[row["seed"]], unwritten = row, unwritten + 1
            for words in row["broken"]:
                report.progress(f"seed {row['seed']}: {words}")
            if count % _EVERY == 0:
                report.progress(f"{count}/{len(wanted)} runs")
                if path is not None:
                    write(document(rows), path)
                    unwritten = 0
    finally:
        if path is not None and (unwritten or not path.exists()):
            write(document(rows), path)
    return rows
