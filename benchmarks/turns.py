"""Loaders that take turns: what happens to the machine meanwhile happens to all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import click
import numpy as np

from benchmarks import report
from benchmarks.isolate import MeasurementError
from benchmarks.peers import Chosen, choose, installed
from minato_gpu.util.messages import from_extra

with from_extra("bench"):
    import scipy

Result = TypeVar("Result")
Row = dict[str, Any]


class Named(Protocol):
    """Whatever takes turns."""

    @property
    def name(self) -> str: ...


Turn = TypeVar("Turn", bound=Named)


def present(loaders: Sequence[Chosen], wanted: Sequence[str] = ()) -> list[Chosen]:
    """Those whose name contains one of the ``wanted`` words (all, if none), as far as their package is here; the names
    of the others go into the document. Raises click.UsageError for a word that fits none."""
    try:
        chosen = choose(loaders, wanted)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    here = [each for each in chosen if installed(each)]
    absent = [each.name for each in chosen if each not in here]
    click.get_current_context().meta.setdefault(report.NOT_INSTALLED, []).extend(absent)
    return here


def in_turns(
    case: str,
    loaders: Sequence[Turn],
    repetitions: int,
    measure: Callable[[Turn], Result],
    figures: Callable[[Result], str],
    time_left: Callable[[], bool] = lambda: True,
) -> tuple[dict[str, list[Result]], dict[str, str]]:
    """Measure every loader once in each repetition: the results by name, and the last error of those that failed.

    ``measure`` raises MeasurementError; ``figures`` says in a few words what it found, for the progress. Another
    repetition begins only while there is ``time_left``.
    """
    runs: dict[str, list[Result]] = {loader.name: [] for loader in loaders}
    errors: dict[str, str] = {}
    for repetition in range(repetitions):
        if repetition and not time_left():
            break
        for loader in loaders:
            where = f"{case}, {repetition + 1}/{repetitions}, {loader.name}"
            try:
                outcome = measure(loader)
            except MeasurementError as error:
                errors[loader.name] = str(error)
                report.progress(f"{where} failed:\n{error}")
                continue
            runs[loader.name].append(outcome)
            report.progress(f"{where}: {figures(outcome)}")
    return runs, errors


def measured_rows(
    case: str,
    loaders: Sequence[Turn],
    repetitions: int,
    measure: Callable[[Turn], Result],
    figures: Callable[[Result], str],
) -> tuple[list[Row], dict[str, list[Result]]]:
    """A row for each loader, which take turns (see ``in_turns``), with the summary of each figure of its runs or the
    error; and the runs by name."""
    runs, errors = in_turns(case, loaders, repetitions, measure, figures)
    rows = []
    for loader in loaders:
        row: Row = {"case": case, "loader": loader.name}
        if (order := getattr(loader, "order", None)) is not None:
            row["order"] = order
        row |= {"repetitions": len(runs[loader.name]), **report.figures(runs[loader.name])}
        rows.append(row | ({"error": errors[loader.name]} if loader.name in errors else {}))
    return rows, runs


def paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """The ratio ours / theirs and its 95 % interval: Student's t on the logarithms of the repetitions' ratios.

    The interval is infinite where there is one repetition only. Raises ValueError where the numbers do not match.
    """
    logs = np.log(np.asarray(ours, dtype=np.float64) / np.asarray(theirs, dtype=np.float64))
    if logs.ndim != 1 or len(ours) != len(theirs) or not len(logs):
        raise ValueError(f"{len(ours)} and {len(theirs)} repetitions cannot be paired")
    middle = float(logs.mean())
    if len(logs) == 1:
        return float(np.exp(middle)), 0.0, float("inf")
    half = float(scipy.stats.t.ppf(0.975, len(logs) - 1) * scipy.stats.sem(logs))
    return float(np.exp(middle)), float(np.exp(middle - half)), float(np.exp(middle + half))


def ratio_columns(name: str, ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float | None]:
    """``paired`` as ``name``, ``name_low`` and ``name_high`` of a row; no end of an interval that is infinite."""
    ratio, low, high = paired(ours, theirs)
    return {name: ratio, f"{name}_low": low, f"{name}_high": high if np.isfinite(high) else None}


def cases_called(cases: Sequence[Turn], wanted: Sequence[str]) -> list[Turn]:
    """Those whose name contains one of the ``wanted`` words, or all. Raises click.UsageError for one that fits none."""
    for word in wanted:
        if not any(word in case.name for case in cases):
            raise click.UsageError(f"no case is called {word!r}; there are: {'; '.join(case.name for case in cases)}")
    return [case for case in cases if not wanted or any(word in case.name for word in wanted)]
