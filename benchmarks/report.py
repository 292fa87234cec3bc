"""What every benchmark prints: repetitions reduced to a median and a spread, one JSON document, one table."""

from __future__ import annotations

import dataclasses
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

NOT_INSTALLED = "benchmarks.not_installed"
"""Where the command's context has the names of loaders whose package is missing."""

_PERIOD_S = 5.0
_PEERS = ("spdl", "torchdata", "nvidia-dali-cuda130", "datasets", "scipy")


def median(values: Sequence[float]) -> float:
    """The median of the repetitions."""
    return float(np.median(values))


def spread(values: Sequence[float]) -> float:
    """The interquartile range of the repetitions, in the unit of the values."""
    low, high = np.percentile(values, [25, 75])
    return float(high - low)


def summarise(name: str, values: Sequence[float], unit: str = "") -> dict[str, float]:
    """``name`` (median), ``name_spread`` (interquartile range), ``name_min``, ``name_max``, with their unit."""
    if not values:
        raise ValueError(f"no repetition of {name} to summarise")
    return {
        f"{name}{unit}": median(values),
        f"{name}_spread{unit}": spread(values),
        f"{name}_min{unit}": float(np.min(values)),
        f"{name}_max{unit}": float(np.max(values)),
    }


_UNIT = re.compile(r"(?<!_per)_(s|us|ms)$")


def figures(runs: Sequence[Any]) -> dict[str, float]:
    """``summarise`` of every number that the runs have: NamedTuples or dataclasses, with units at the ends of names."""
    if not runs:
        return {}
    found: dict[str, float] = {}
    for name in getattr(runs[0], "_fields", None) or [field.name for field in dataclasses.fields(runs[0])]:
        values = [getattr(run, name) for run in runs]
        if isinstance(values[0], (int, float)):
            unit = _UNIT.search(name)
            stem, end = (name, "") if unit is None else (name[: unit.start()], unit[0])
            found |= summarise(stem, values, end)
    return found


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
    if any("failed" in row or isinstance(row.get("error"), str) for row in rows):
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


def command(function: Callable[..., None]) -> Callable[..., None]:
    """The options that every benchmark has: ``--json``, ``--quick`` and ``--repetitions``."""
    options = (
        click.option(
            "--json",
            "json_path",
            metavar="PATH",
            callback=writable,
            help="Write the figures as JSON; - for standard output.",
        ),
        click.option("--quick", is_flag=True, help="Toy size: shows that it works; the figures mean nothing."),
        click.option("--repetitions", type=click.IntRange(min=1), help="How often everything is repeated."),
    )
    wrapped: Callable[..., None] = functools.wraps(function)(functools.partial(_ended_in_order, function))
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped


def benchmark(
    name: str, usual: int, *, shown: Sequence[str] = (), **fixed: Any
) -> Callable[[Callable[..., Iterable[Row]]], click.Command]:
    """Makes a command of a function that yields rows: parses options, writes the document, prints the tables.

    The function takes ``quick``, ``repetitions`` (``usual`` if not given; one if quick) and its own options, which are
    the document's settings beside the ``fixed`` ones. The document grows with the rows, because hours may be lost.
    ``shown``: figures of the tables, where they are not those of the page.
    """

    def decorated(function: Callable[..., Iterable[Row]]) -> click.Command:
        @functools.wraps(function)
        def run(json_path: str | None, quick: bool, repetitions: int | None, **options: Any) -> None:
            repetitions = repetitions or (1 if quick else usual)
            chosen = {key: value for key, value in options.items() if not isinstance(value, Path)}
            settings = {**fixed, **chosen, "repetitions": repetitions, "quick": quick}
            content, written = document(name, settings, ()), perf_counter()
            for row in function(quick=quick, repetitions=repetitions, **options):
                content["rows"].append(dict(row))
                if json_path not in (None, "-") and perf_counter() - written > _PERIOD_S:
                    report.write(content, str(json_path))
                    written = perf_counter()
            content["settings"]["not_installed"] = click.get_current_context().meta.get(NOT_INSTALLED, [])
            publish(content, json_path, shown)

        return click.command(help=sys.modules[function.__module__].__doc__)(command(run))

    return decorated


def _ended_in_order(function: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """A request to end (SIGTERM, as ``timeout`` sends it) unwinds the stack, so that no measurement is left running."""
    end_in_order()
    function(*arguments, **options)


def end_in_order() -> None:
    """From now on a request to end is an exception."""
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


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
