"""Loaders that take turns: what happens to the machine meanwhile happens to all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Protocol, TypeVar

import click
import numpy as np

from benchmarks import report
from benchmarks.isolate import MeasurementError
from benchmarks.peers import Loader, installed
from minato_gpu.util.messages import from_extra

with from_extra("bench"):
    import scipy

Result = TypeVar("Result")
Row = dict[str, Any]
_DRAWS = 10_000


class Named(Protocol):
    """Whatever takes turns."""

    @property
    def name(self) -> str: ...


Turn = TypeVar("Turn", bound=Named)


def select(kind: str, things: Sequence[Turn], wanted: Sequence[str]) -> list[Turn]:
    """Those whose name contains one of the ``wanted`` words, or all. Raises click.UsageError for one that fits none."""
    for word in wanted:
        if not any(word in each.name for each in things):
            names = "; ".join(each.name for each in things)
            raise click.UsageError(f"no {kind} is called {word!r}; there are: {names}")
    return [each for each in things if not wanted or any(word in each.name for word in wanted)]


def present(loaders: Sequence[Loader], wanted: Sequence[str]) -> list[Loader]:
    """Those that are ``wanted``, as far as their package is here; the names of the others go into the document."""
    chosen = select("loader", loaders, wanted)
    here = [each for each in chosen if installed(each)]
    report.note_absent(each.name for each in chosen if each not in here)
    return here


def fastest(case: str, tried: Sequence[Turn], rate: Callable[[Turn], float]) -> tuple[float, Turn] | None:
    """The rate of the fastest settings, in samples a second, and these; None where all fail with MeasurementError."""
    found: list[tuple[float, Turn]] = []
    for loader in tried:
        try:
            found.append((rate(loader), loader))
        except MeasurementError as error:
            report.progress(f"{case}: {loader} failed:\n{error}")
    if not found:
        return None
    best = max(found, key=lambda each: each[0])
    report.progress(f"{case}: {', '.join(f'{rate:.0f}' for rate, _ in found)} samples/s -> {best[1]}")
    return best


def measured_rows(
    case: str, loaders: Sequence[Turn], repetitions: int, measure: Callable[[Turn], Result], *, alternate: bool = False
) -> tuple[list[Row], dict[str, list[Result]]]:
    """Measure every loader once in each repetition: a row for each, with the summary of each figure of its runs, or its
    last error; and the runs by name.

    ``measure`` returns a NamedTuple or raises MeasurementError. ``alternate``: every other repetition in the reverse
    order.
    """
    runs: dict[str, list[Result]] = {loader.name: [] for loader in loaders}
    errors: dict[str, dict[str, str]] = {}
    for repetition in range(repetitions):
        for loader in loaders[:: -1 if alternate and repetition % 2 else 1]:
            where = f"{case}, {repetition + 1}/{repetitions}, {loader.name}"
            try:
                outcome = measure(loader)
            except MeasurementError as error:
                errors[loader.name] = {"error": str(error)}
                report.progress(f"{where} failed:\n{error}")
                continue
            runs[loader.name].append(outcome)
            first = islice(report.numbers(outcome).items(), 2)
            report.progress(f"{where}: {', '.join(f'{name} {value:.4g}' for name, value in first)}")
    rows = []
    for name, loader in zip(runs, loaders, strict=True):
        row: Row = {"case": case, "loader": name}
        if isinstance(loader, Loader):
            row["order"] = loader.order
        rows.append(row | {"repetitions": len(runs[name]), **report.figures(runs[name]), **errors.get(name, {})})
    return rows, runs


def paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """The ratio ours / theirs (geometric mean of the pairs) and its 95 % bootstrap interval.

    10,000 samples are drawn from the pairs. Its percentiles are wider than 2.5 and 97.5 as Student's t is wider than
    the normal distribution (Hesterberg, "What Teachers Should Know about the Bootstrap", 2015): of few pairs, plain
    ones cover too little. The interval is infinite where there is one pair only. Raises ValueError where the numbers
    do not match.
    """
    logs = np.log(np.asarray(ours, dtype=np.float64) / np.asarray(theirs, dtype=np.float64))
    if logs.ndim != 1 or len(ours) != len(theirs) or not len(logs):
        raise ValueError(f"{len(ours)} and {len(theirs)} repetitions cannot be paired")
    middle, count = float(np.exp(logs.mean())), len(logs)
    if count == 1:
        return middle, 0.0, float("inf")
    means = logs[np.random.default_rng(0).integers(0, count, (_DRAWS, count))].mean(axis=1)
    tail = scipy.stats.norm.cdf(-np.sqrt(count / (count - 1)) * scipy.stats.t.ppf(0.975, count - 1))
    low, high = np.exp(np.quantile(means, (tail, 1 - tail)))
    return middle, float(low), float(high)


def ratio_columns(name: str, ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float | None]:
    """``paired`` as ``name``, ``name_low`` and ``name_high`` of a row; no end of an interval that is infinite."""
    ratio, low, high = paired(ours, theirs)
    return {name: ratio, f"{name}_low": low, f"{name}_high": high if np.isfinite(high) else None}
