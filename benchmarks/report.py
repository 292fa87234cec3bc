"""What every benchmark prints: repetitions reduced to a median and a spread, one JSON document, one table."""

from __future__ import annotations

import functools
import re
import signal
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np

from minato_gpu.lab import report
from minato_gpu.lab.commands.common import writable
from minato_gpu.lab.console import open_console, show

Row = Mapping[str, Any]

_NOT_INSTALLED = "benchmarks.not_installed"  # where the command's context has names of loaders

_PERIOD_S = 5.0
_PEERS = ("spdl", "torchdata", "nvidia-dali-cuda130", "datasets", "scipy")


def median(values: Sequence[float]) -> float:
    """The median of the repetitions."""
    return float(np.median(values))


def summarise(name: str, values: Sequence[float], unit: str = "") -> dict[str, float]:
    """``name`` (median), ``name_spread`` (interquartile range), ``name_min``, ``name_max``, with their unit."""
    if not values:
        raise ValueError(f"no repetition of {name} to summarise")
    low, high = np.percentile(values, [25, 75])
    return {
        f"{name}{unit}": median(values),
        f"{name}_spread{unit}": float(high - low),
        f"{name}_min{unit}": float(np.min(values)),
        f"{name}_max{unit}": float(np.max(values)),
    }


_UNIT = re.compile(r"(?<!_per)_(s|us|ms)$")


def numbers(run: Any) -> dict[str, float]:
    """Those fields of a NamedTuple that are numbers."""
    return {name: value for name, value in run._asdict().items() if isinstance(value, (int, float))}


def figures(runs: Sequence[Any]) -> dict[str, float]:
    """``summarise`` of every number that the runs, NamedTuples, have; units are at the ends of their names."""
    found: dict[str, float] = {}
    for name in numbers(runs[0]) if runs else ():
        unit = _UNIT.search(name)
        stem, end = (name, "") if unit is None else (name[: unit.start()], unit[0])
        found |= summarise(stem, [getattr(run, name) for run in runs], end)
    return found


def note_absent(names: Iterable[str]) -> None:
    """Has the document of the command that runs name loaders whose package is missing."""
    click.get_current_context().meta.setdefault(_NOT_INSTALLED, []).extend(names)


def document(benchmark: str, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One benchmark's document: ``benchmark`` and what ``minato_gpu.lab.report`` has, with the peers' versions."""
    content = report.document(settings, rows, benchmark=benchmark)
    content["versions"] = report.versions(_PEERS)
    return content


def publish(content: Mapping[str, Any], json_path: str | None, names: Sequence[str] = ()) -> None:
    """Write the document to ``json_path`` where one is given; print tables unless the document takes their place.

    ``names``: of the figures in the tables, those of the page if not given. Exits with 1 where a measurement failed.
    """
    rows = content["rows"]
    if json_path is not None:
        report.write(content, json_path)
    if json_path != "-":
        shown = names or (*columns(content["benchmark"]), "error")
        for case in dict.fromkeys(row.get("case", content["benchmark"]) for row in rows):
            print_table(str(case), [row for row in rows if row.get("case", case) == case], shown)
    if any("error" in row for row in rows):
        raise SystemExit(1)


@functools.cache
def _tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))


def columns(table: str) -> dict[str, tuple[str, str]]:
    """The figures that a table of the page shows, each with its title and how it is formatted."""
    return {key: (said, "") if isinstance(said, str) else (said[0], said[1]) for key, said in _tables()[table].items()}


def print_table(title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """A table of those ``columns`` that some row has, on standard output."""
    show(open_console(None), title, rows, columns)


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; each row has as many cells as there are titles."""
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in rows)])


def progress(text: str) -> None:
    """One line on standard error, so that standard output stays the document."""
    click.echo(text, err=True)


def benchmark(
    name: str, usual: int, *, shown: Sequence[str] = (), **fixed: Any
) -> Callable[[Callable[..., Iterable[Row]]], click.Command]:
    """Makes a command of a function that yields rows: parses options, writes the document, prints the tables.

    The function takes ``quick``, ``repetitions`` (``usual`` if not given; one if quick) and its own options, which are
    the document's settings beside the ``fixed`` ones. The document grows with the rows, because hours may be lost.
    ``shown``: figures of the tables, where they are not those of the page.
    """

    def decorated(function: Callable[..., Iterable[Row]]) -> click.Command:
        @click.command(help=sys.modules[function.__module__].__doc__)
        @json_option
        @quick_option
        @click.option("--repetitions", type=click.IntRange(min=1), help="How often everything is repeated.")
        @functools.wraps(function)
        def run(json_path: str | None, quick: bool, repetitions: int | None, **options: Any) -> None:
            end_in_order()
            repetitions = repetitions or (1 if quick else usual)
            chosen = {key: value for key, value in options.items() if not isinstance(value, Path)}
            settings = {**fixed, **chosen, "repetitions": repetitions, "quick": quick}
            content, written = document(name, settings, ()), perf_counter()
            for row in function(quick=quick, repetitions=repetitions, **options):
                content["rows"].append(dict(row))
                if json_path not in (None, "-") and perf_counter() - written > _PERIOD_S:
                    report.write(content, str(json_path))
                    written = perf_counter()
            content["settings"]["not_installed"] = click.get_current_context().meta.get(_NOT_INSTALLED, [])
            publish(content, json_path, shown)

        return run

    return decorated


def end_in_order() -> None:
    """From now on a request to end (SIGTERM, as ``timeout`` sends it) unwinds the stack, so that no measurement is left
    running."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


json_option = click.option(
    "--json",
    "json_path",
    metavar="PATH",
    callback=writable,
    help="Write the figures as JSON; - for standard output.",
)
quick_option = click.option("--quick", is_flag=True, help="Toy size: shows that it works; the figures mean nothing.")
loader_option = click.option(
    "--loader", "wanted", multiple=True, help="Only loaders whose name contains this word; repeatable."
)
case_option = click.option(
    "--case", "names", multiple=True, help="Only cases whose name contains this word; repeatable."
)
workers_option = click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True)
folder_option = click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="On the disk to be measured; without it, that of temporary files.",
)
