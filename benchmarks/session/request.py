"""A request for a part of a session: its size, the rows that are known already, and its deadline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

from benchmarks.isolate import isolated
from benchmarks.session.settings import Settings

Result = TypeVar("Result")

LEAST_S = 5.0  # what whoever comes last may take: between a part's deadline and its limit there is time for one


@dataclass(frozen=True)
class Request:
    """``rows``: those of the parts before it, and its own of an earlier command; ``deadline``: by ``perf_counter``."""

    settings: Settings
    rows: Sequence[Mapping[str, Any]]
    deadline: float

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, which may have passed."""
        return self.deadline - perf_counter()

    def time_for(self, seconds: float) -> bool:
        """Whether something that takes so long is through in time."""
        return seconds < self.left_s

    def limit_s(self, seconds: float) -> float:
        """How long something may take that would be given so long."""
        return max(LEAST_S, min(seconds, self.left_s))

    def isolated(self, most_s: float, function: Callable[..., Result], *arguments: Any) -> Result:
        """The result of ``function(*arguments)`` in a fresh process, for which there are ``most_s`` seconds, or those
        that are left. Raises MeasurementError."""
        return isolated(function, *arguments, timeout_s=self.limit_s(most_s), settle_s=self.settings.settle_s)

    def row(self, case: str, name: str) -> Mapping[str, Any] | None:
        """What is known already, if that is an answer."""
        found = [row for row in self.rows if (row.get("case"), row.get("name")) == (case, name)]
        return found[-1] if found and not {"error", "missing"} & found[-1].keys() else None
