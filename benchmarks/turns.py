"""Loaders that take turns: what happens to the machine meanwhile happens to all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from benchmarks import report
from benchmarks.isolate import MeasurementError

Result = TypeVar("Result")


class Named(Protocol):
    """Whatever takes turns."""

    @property
    def name(self) -> str: ...


Turn = TypeVar("Turn", bound=Named)


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
