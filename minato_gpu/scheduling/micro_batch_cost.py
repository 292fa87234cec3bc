"""What a micro-batch costs a GPU beside its samples: a line through (samples, seconds) of those that were measured.

A GPU takes milliseconds for a micro-batch of whatever size: its JPEG engine as long as for the largest photograph. Were
that counted as the samples' own cost, a lane that was given few at once would look slow, and be given fewer still. So
samples are counted as in a full micro-batch. While all have been small, and much of one size, a full one is taken to
need but three times as long: then the lane is given larger ones, and it is known.

Method: ridge regression with exponential forgetting, towards that guess. Sizes that differ little say little, and a
host that is busy adds its stalls to single micro-batches: plain least squares then takes these for the samples' own.
"""

from __future__ import annotations

_FORGET = 0.97
_GUESS = 3.0  # times the seconds of small ones that a full one is taken to need
_SPREAD = 1 / 8  # of a full micro-batch: two micro-batches whose sizes spread so far count as much as the guess
_LEAST = 0.02  # of its seconds that samples are taken to cost


class MicroBatchCost:
    """``most``: samples of a full micro-batch."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._weight = self._n = self._s = self._nn = self._ns = 0.0  # sums

    def of_samples(self, count: int, seconds: float) -> float:
        """Takes in that a micro-batch of ``count`` took so long; seconds that its samples would take in a full one."""
        self._add(count, seconds)
        fixed = min(self.fixed_s, seconds)
        return max(seconds - fixed * (1 - count / self._most), _LEAST * seconds)

    @property
    def fixed_s(self) -> float:
        """Seconds of a micro-batch beside its samples."""
        n, s = self._n / self._weight, self._s / self._weight
        variance, covariance = self._nn / self._weight - n * n, self._ns / self._weight - n * s
        guess = (_GUESS - 1) * s / (self._most - n) if self._most > _GUESS * n else s / n
        spread = 2 * (_SPREAD * self._most) ** 2 / self._weight
        slope = (covariance + spread * guess) / (variance + spread)
        return min(max(s - max(slope, 0.0) * n, 0.0), s)

    def _add(self, count: int, seconds: float) -> None:
        added = (1.0, count, seconds, count * count, count * seconds)
        sums = (self._weight, self._n, self._s, self._nn, self._ns)
        self._weight, self._n, self._s, self._nn, self._ns = (
            _FORGET * old + new for old, new in zip(sums, added, strict=True)
        )
