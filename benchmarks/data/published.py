"""What the MinatoLoader paper measured of its workloads' preprocessing times, and how to make data of that spread.

Milliseconds per sample, MinatoLoader (EuroSys 2026, arXiv 2509.10712), table of preprocessing times. Only the ratios
to the median are used: they say how unlike the samples are, on whatever machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

RATIOS = ("mean", "p75", "p90", "max")
"""The ratios to the median that generated data must show."""


@dataclass(frozen=True)
class Spread:
    """Preprocessing times of one workload, in milliseconds."""

    mean: float
    median: float
    p75: float
    p90: float
    minimum: float
    maximum: float

    @property
    def ratios(self) -> dict[str, float]:
        """Mean, 75th and 90th percentile and maximum, over the median."""
        values = (self.mean, self.p75, self.p90, self.maximum)
        return {name: value / self.median for name, value in zip(RATIOS, values, strict=True)}

    def relative(self, count: int) -> Array:
        """Costs of ``count`` samples over their median, rising, from the minimum to the maximum.

        Linear between the published points below the median and geometric above it, which comes within 2 % of the
        published means.
        """
        shares = np.linspace(0.0, 1.0, count)
        points = np.array([self.median, self.p75, self.p90, self.maximum]) / self.median
        above = np.exp(np.interp(shares, [0.5, 0.75, 0.9, 1.0], np.log(points)))
        below = np.interp(shares, [0.0, 0.5], [self.minimum / self.median, 1.0])
        return np.where(shares < 0.5, below, above)


SPREADS: Mapping[str, Spread] = {
    "object_detection": Spread(31, 28, 30, 35, 11, 176),
    "segmentation_3d": Spread(500, 470, 630, 750, 10, 2230),
    "speech_recognition": Spread(998, 508, 509, 3008, 502, 3017),
}


def measured(seconds: ArrayLike) -> dict[str, float]:
    """The same ratios of measured times."""
    times = np.asarray(seconds, dtype=np.float64)
    median = float(np.median(times))
    values = (times.mean(), *np.percentile(times, [75, 90, 100]))
    return {name: float(value) / median for name, value in zip(RATIOS, values, strict=True)}
