"""What the MinatoLoader paper measured of its workloads' preprocessing times, and how to make data of that spread.

Milliseconds per sample, MinatoLoader (EuroSys 2026, arXiv 2509.10712), table of preprocessing times. Only the ratios
to the median are used: they say how unlike the samples are, on whatever machine. What samples cost here is measured on
one core.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minato_gpu import Pipeline
from minato_gpu.samples import sample_seed

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


# --- what samples cost here, and the size of a sample that shall cost so much -----------------------------------------


def costs(dataset: Any, pipeline: Pipeline, indices: Iterable[int]) -> Array:
    """CPU seconds that this thread needs for each sample, with the draws of epoch 0; the least of three.

    One pass over all samples after the other: a machine is slower for some seconds, now and then, and a sample's
    repetitions should not all fall into that.
    """
    chosen = list(indices)
    passes = [[_cost(dataset, pipeline, index) for index in chosen] for _ in range(3)]
    least: Array = np.min(np.array(passes), axis=0)
    return least


def _cost(dataset: Any, pipeline: Pipeline, index: int) -> float:
    before = time.thread_time()
    pipeline.run(dataset[index], sample_seed(0, 0, index, 0))
    return time.thread_time() - before


class Curve:
    """Seconds as a function of a size, through measured points: both on logarithmic scales, never falling."""

    def __init__(self, sizes: Sequence[float], seconds: Sequence[float]) -> None:
        self._sizes = np.log(np.asarray(sizes, dtype=np.float64))
        rising = np.maximum.accumulate(np.asarray(seconds, dtype=np.float64))
        # strictly, so that it can be inverted
        self._seconds = np.log(rising * (1 + 1e-6 * np.arange(len(rising))))

    @property
    def limits(self) -> tuple[float, float]:
        """The smallest and the largest size that was measured."""
        return float(np.exp(self._sizes[0])), float(np.exp(self._sizes[-1]))

    def seconds(self, sizes: Array) -> Array:
        """What samples of these sizes cost."""
        seconds: Array = np.exp(np.interp(np.log(sizes), self._sizes, self._seconds))
        return seconds

    def sizes(self, seconds: Array) -> Array:
        """The sizes of samples that cost so much, within the sizes that were measured."""
        sizes: Array = np.exp(np.interp(np.log(seconds), self._seconds, self._sizes))
        return sizes


def sizes_of_mixture(wanted: Array, curves: Sequence[tuple[float, Curve]]) -> Array:
    """Sizes, rising, whose costs have the distribution ``wanted`` (rising) when chance decides which curve holds.

    ``curves``: (probability, curve). Each round moves every size by what the mixture misses at its rank.
    """
    sizes = curves[0][1].sizes(wanted)
    ranks = (np.arange(len(wanted)) + 0.5) / len(wanted)
    for _ in range(60):
        found = np.concatenate([curve.seconds(sizes) for _, curve in curves])
        weights = np.concatenate([np.full(len(sizes), share / len(sizes)) for share, _ in curves])
        order = np.argsort(found, kind="stable")
        reached = np.cumsum(weights[order]) - weights[order] / 2
        mixed = np.interp(ranks, reached, found[order])
        sizes = np.clip(np.sort(sizes * np.sqrt(wanted / mixed)), *curves[0][1].limits)
    return sizes
