"""Runs with random faults, one for each seed, and what became of them: for ``disk_chaos`` and ``cache_chaos``."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks import report
from minato_gpu.commands import writable
from minato_gpu.notices import LOGGER
from minato_gpu.report import write

_COLUMNS = ("what", "count")


def command(name: str, run: Callable[[int, Path], dict[str, Any]], totals: Sequence[str], help_: str) -> click.Command:
    """``python -m benchmarks.NAME``: ends with status 1 where a run was broken.

    ``run`` is given a seed and a folder, and returns a row: ``injected`` faults by kind, sentences of what is
    ``broken``, and numbers, of which ``totals`` are added up.
    """

    @click.command(help=help_)
    @click.option("--seeds", type=click.IntRange(min=1), default=50, show_default=True, help="How many runs.")
    @click.option("--first-seed", type=click.IntRange(min=0), default=0, show_default=True)
    @click.option(
        "--folder", type=click.Path(exists=True, file_okay=False, path_type=Path), help="On the disk to be used."
    )
    @click.option(
        "--json",
        "json_path",
        metavar="PATH",
        callback=writable,
        help="Write the figures as JSON; - for standard output.",
    )
    def main(seeds: int, first_seed: int, folder: Path | None, json_path: str | None) -> None:
        LOGGER.setLevel(logging.CRITICAL)
        report.end_in_order()
        rows, injected = [], Counter[str]()
        for seed in range(first_seed, first_seed + seeds):
            rows.append(run(seed, folder or Path(tempfile.gettempdir())))
            injected.update(rows[-1]["injected"])
            for words in rows[-1]["broken"]:
                report.progress(f"seed {seed}: {words}")
        broken = sum(bool(row["broken"]) for row in rows)
        sums = {total: sum(row[total] for row in rows) for total in totals}
        if json_path != "-":
            lines = [*injected.items(), *sums.items(), ("runs broken", broken)]
            report.print_table(f"{seeds} runs", [{"what": what, "count": count} for what, count in lines], _COLUMNS)
        if json_path is not None:
            settings = {"seeds": seeds, "first_seed": first_seed, "injected": dict(injected), "runs_broken": broken}
            write(report.document(name, settings | sums, rows), json_path)
        if broken:
            raise SystemExit(1)

    return main
