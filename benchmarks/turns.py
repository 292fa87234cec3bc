"""Loaders that take turns: what happens to the machine meanwhile happens to all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from benchmarks import report
from benchmarks.isolate import MeasurementError
from benchmarks.peers import Loader

Result = TypeVar("Result")


def in_turns(
    case: str,
    loaders: Sequence[Loader],
    repetitions: int,
    measure: Callable[[Loader], Result],
    figures: Callable[[Result], str],
) -> tuple[dict[str, list[Result]], dict[str, str]]:
    """Measure every loader once in each repetition: the results by name, and the last error of those that failed.

    ``measure`` raises MeasurementError; ``figures`` says in a few words what it found, for the progress.
    """
    runs: dict[str, list[Result]] = {loader.name: [] for loader in loaders}
    errors: dict[str, str] = {}
    for repetition in range(repetitions):
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
