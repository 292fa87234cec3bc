"""Estimates the fixed cost of a GPU micro-batch, by a line through measured (samples, seconds).

A GPU takes milliseconds for a micro-batch of any size: its JPEG engine as long as for the largest photograph. If that
counted as the samples' own cost, a lane that was given few at once would look slow and be given fewer still. So samples
are costed as in a full micro-batch. While all micro-batches were small and of similar size, a full one is assumed to
take only three times as long: the lane is then given larger ones, and the truth is measured.

Method: ridge regression with exponential forgetting, towards that guess. Sizes that differ little tell little, and a
busy host's stalls fall on single micro-batches, which plain least squares takes for the samples' own cost.
"""

from __future__ import annotations

_FORGET = 0.97  # weight of older micro-batches, for each new one
_GUESS = 3.0  # assumed seconds of a full micro-batch over those of small ones
_SPREAD = 1 / 8  # spread of sizes, over a full micro-batch, at which two of them weigh as much as the guess
_LEAST = 0.02  # least share of a micro-batch's seconds that its samples cost


class MicroBatchCost:
    """Fixed cost of the micro-batches of one lane. ``most``: samples of a full micro-batch."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._weight = self._n = self._s = self._nn = self._ns = 0.0  # weighted sums over micro-batches

    def of_samples(self, count: int, seconds: float) -> float:
        """Adds a micro-batch of ``count`` samples that took ``seconds``; returns what these samples
        would have taken as a part of a full one."""
        self._add(count, seconds)
        fixed = min(self.fixed_s, seconds)
        return max(seconds - fixed * (1 - count / self._most), _LEAST * seconds)

    @property
    def fixed_s(self) -> float:
        """Seconds of a micro-batch beside its samples. Not defined before the first micro-batch."""
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
