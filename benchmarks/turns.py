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
_DRAWS = 10_000


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
    *,
    alternate: bool = False,
) -> tuple[dict[str, list[Result]], dict[str, str]]:
    """Measure every loader once in each repetition: the results by name, and the last error of those that failed.

    ``measure`` raises MeasurementError; ``figures`` says in a few words what it found, for the progress. Another
    repetition begins only while there is ``time_left``. ``alternate``: every other one in the reverse order.
    """
    runs: dict[str, list[Result]] = {loader.name: [] for loader in loaders}
    errors: dict[str, str] = {}
    for repetition in range(repetitions):
        if repetition and not time_left():
            break
        for loader in loaders[:: -1 if alternate and repetition % 2 else 1]:
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


def cases_called(cases: Sequence[Turn], wanted: Sequence[str]) -> list[Turn]:
    """Those whose name contains one of the ``wanted`` words, or all. Raises click.UsageError for one that fits none."""
    for word in wanted:
        if not any(word in case.name for case in cases):
            raise click.UsageError(f"no case is called {word!r}; there are: {'; '.join(case.name for case in cases)}")
    return [case for case in cases if not wanted or any(word in case.name for word in wanted)]
