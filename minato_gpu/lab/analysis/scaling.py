"""How samples a second grow with workers: fitted to what was measured, never taken for a straight line.

The universal scalability law (Gunther, "A Simple Capacity Model of Massively Parallel Transaction Systems", CMG 1993):
with w workers, rate(w) = w / (cost (1 + contention (w - 1) + crosstalk w (w - 1))). In w / rate(w), the seconds that a
slot takes for a sample, it is linear, and least squares with no negative part fit it. Beyond the cores that computing
workers have, no further worker brings anything: there the law is not asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Law:
    """``cost_s``: of a sample with one worker; ``contention`` and ``crosstalk`` as in the module's head."""

    cost_s: float
    contention: float = 0.0
    crosstalk: float = 0.0

    def slot_s(self, workers: float) -> float:
        """Seconds of one of so many workers for a sample."""
        more = workers - 1.0
        return self.cost_s * (1.0 + self.contention * more + self.crosstalk * workers * more)

    def rate(self, workers: float) -> float:
        """Samples a second of them all."""
        return workers / self.slot_s(workers)


def fit(workers: Sequence[float], slot_s: Sequence[float]) -> Law:
    """The law through the seconds that a slot took for a sample with so many workers; relative errors count.

    Of two counts of workers there is no crosstalk to be told, of one no contention. Raises ValueError where there is
    nothing, or what is not positive.
    """
    if not len(workers) or min(workers) < 1 or min(slot_s) <= 0:
        raise ValueError(f"scaling is told by positive workers and seconds, got {workers} and {slot_s}")
    count, seconds = np.array(workers, float), np.array(slot_s, float)
    columns = np.stack([np.ones_like(count), count - 1, count * (count - 1)], axis=1) / seconds[:, None]
    known = min(len({*workers}), 3)
    best, least = (float(seconds.mean()), 0.0, 0.0), float("inf")
    for chosen in _PARTS[known]:
        found = np.linalg.lstsq(columns[:, chosen], np.ones_like(seconds), rcond=None)[0]
        error = float(np.square(columns[:, chosen] @ found - 1).sum())
        if (found >= 0).all() and found[0] > 0 and error < least:
            parts = dict(zip(chosen, found.tolist(), strict=True))
            best, least = (parts[0], parts.get(1, 0.0), parts.get(2, 0.0)), error
    cost, contention, crosstalk = best
    return Law(cost, contention / cost, crosstalk / cost)


_PARTS = {1: ([0],), 2: ([0], [0, 1]), 3: ([0], [0, 1], [0, 2], [0, 1, 2])}
"""Which parts of the law may be, by how many counts of workers were tried: none of them is below zero."""
