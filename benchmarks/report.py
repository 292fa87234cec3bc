"""What every benchmark prints: repetitions reduced to a median and a spread, one JSON document, one table."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click
import numpy as np

from minato_gpu.lab import report
from minato_gpu.lab.commands.common import writable
from minato_gpu.lab.console import open_console, show

_PEERS = ("spdl", "torchdata", "scipy")


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


def document(benchmark: str, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One benchmark's document: ``benchmark`` and what ``minato_gpu.lab.report`` has, with the peers' versions."""
    content = report.document(settings, rows, benchmark=benchmark)
    content["versions"] = report.versions(_PEERS)
    return content


def publish(content: Mapping[str, Any], json_path: str | None, columns: Sequence[str]) -> None:
    """Write the document to ``json_path`` where one is given; print tables unless the document takes their place."""
    if json_path is not None:
        report.write(content, json_path)
    if json_path == "-":
        return
    cases = dict.fromkeys(row.get("case", content["benchmark"]) for row in content["rows"])
    for case in cases:
        print_table(str(case), [row for row in content["rows"] if row.get("case", case) == case], columns)


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


def _ended_in_order(function: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """A request to end (SIGTERM, as ``timeout`` sends it) unwinds the stack, so that no measurement is left running."""
    end_in_order()
    function(*arguments, **options)


def end_in_order() -> None:
    """From now on a request to end is an exception."""
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
