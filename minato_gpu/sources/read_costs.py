"""What a read costs, in seconds: a latency and a time for each byte, fitted to the reads that were made.

Policies weigh what they keep by this. A single read's own time would be mostly noise: of two equal files the one whose
request was slow by chance would stay. And they compare what was read today with what was read an hour ago, when storage
may have been twice as fast: so a cost is told in reads of mean size, each at the time's own speed.
"""

from __future__ import annotations

_FORGET = 0.999  # the weight of a read falls by half in 700 of them


class ReadCosts:
    """Least squares over recent reads, in sums that fade."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, nbytes: int, seconds: float) -> None:
        """A read of so many bytes took so long."""
        self._weight = _FORGET * self._weight + 1.0
        self._x = _FORGET * self._x + nbytes
        self._y = _FORGET * self._y + seconds
        self._xx = _FORGET * self._xx + nbytes * nbytes
        self._xy = _FORGET * self._xy + nbytes * seconds

    def compared(self, nbytes: int) -> float:
        """The same in reads of mean size: 1.0 for one of that size, and for all before the first."""
        mean = self.seconds(round(self._x / self._weight)) if self._weight else 0.0
        return self.seconds(nbytes) / mean if mean else 1.0

    def seconds(self, nbytes: int) -> float:
        """What a read of so many bytes is expected to take; 0.0 before the first. Neither part is below zero."""
        if not self._weight:
            return 0.0
        x, y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - x * x
        if spread <= 1e-6 * x * x:  # all are of one size
            return y
        slope = max(0.0, (self._xy / self._weight - x * y) / spread)
        latency = y - slope * x
        return y * nbytes / x if latency < 0 else latency + slope * nbytes
