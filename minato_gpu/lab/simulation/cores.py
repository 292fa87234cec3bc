"""Cores that workers and the consumer share: where more would compute than there are cores, all of it becomes slower.

The kernel shares cores out evenly among threads, and no thread has more than one (Linux, "EEVDF Scheduler"): with two
cores, two workers and a step of one thread have two thirds of a core each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

_HALVINGS = 40


class Slowdown(NamedTuple):
    """How many times as long a worker takes for a sample, and the consumer for its step."""

    worker: float
    consumer: float


ALONE = Slowdown(1.0, 1.0)


@dataclass(frozen=True)
class Cores:
    """The cores that workers and the consumer share."""

    cores: float
    computed: float  # share of a worker's time that it computes; the rest it waits
    consumer: float = 0.0  # cores that the consumer keeps busy during its step; above 1 with several threads

    def pace(self, workers: float, *, stepping: bool = False) -> Slowdown:
        """Returns the slowdown while so many workers prepare, and the consumer is or is not at its step.

        Waiting stays as long as it is: only what is computed takes longer, until all fits into the cores.
        """
        return _pace(self, workers, stepping)

    def stretch(self, workers: float) -> float:
        """Returns how much longer a worker takes for a sample, because its core is another worker's at times."""
        return self.pace(workers).worker

    def at_once(self, workers: float) -> float:
        """Returns how many of so many workers work at the same time."""
        return min(workers, max(1.0, self.cores / self.computed)) if self.computed else workers


@lru_cache(4096)
def _pace(cores: Cores, workers: float, stepping: bool) -> Slowdown:
    threads = cores.consumer * stepping
    if workers * cores.computed + threads <= cores.cores:
        return ALONE
    low, high = 0.0, 1.0  # of the part of a core that a worker's thread has
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        pace = _with(cores, middle)
        used = workers * cores.computed / pace.worker + threads / pace.consumer
        low, high = (low, middle) if used > cores.cores else (middle, high)
    return _with(cores, high)


def _with(cores: Cores, part: float) -> Slowdown:
    """A worker's thread having this part of a core whenever it would compute."""
    of_step = min(1.0, cores.consumer)
    return Slowdown(1 - cores.computed + cores.computed / part, 1 - of_step + of_step / part)
