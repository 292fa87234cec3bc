"""How the time is shared out: pure."""

from __future__ import annotations

from collections.abc import Mapping

SHARES: Mapping[str, float] = {
    "sight": 20.0,  # the loader as it is, for the first time: which files samples are in, a batch to replay
    "compute": 12.0,
    "copied": 5.0,  # a batch that has yet to be moved to the device
    "warm": 18.0,
    "cold": 20.0,
    "prepare": 6.0,
    "scaling": 12.0,
    "storage": 7.0,
}
"""Phases in their order, and what each may take of the whole."""
ROUNDS_UNTIL = 0.72
"""Of the time: until then phases are repeated, where an epoch is too short to fill them at once."""
LEAST = 2
"""Batches of a phase, however long they take."""


class TimeBox:
    """So many seconds for all phases together. What one leaves over goes to those after it."""

    def __init__(self, seconds: float, begin: float) -> None:
        self.seconds = seconds
        self._begin = begin

    def passed(self, now: float) -> float:
        """The share of the time that has passed."""
        return (now - self._begin) / self.seconds

    def seconds_for(self, name: str, now: float, *, left_out: frozenset[str] = frozenset()) -> float:
        """For this phase, when it begins. ``left_out``: phases after it that there will not be."""
        names = list(SHARES)
        after = [each for each in names[names.index(name) :] if each not in left_out]
        whole = sum(SHARES[each] for each in after)
        return max(0.0, self._begin + self.seconds - now) * SHARES[name] / whole


def most_batches(length: int | None) -> int | None:
    """Of one phase: so few that the four phases that need the script fit into one epoch of it."""
    return None if length is None else max(LEAST, length // 4)


def settling(workers: int, most: int | None) -> int:
    """How many batches a phase begins with that do not count: workers have just started, and come in step."""
    return workers + 1 if most is None else min(workers + 1, most // 2)
