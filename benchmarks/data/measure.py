"""What samples cost one process on one core, and how to find the size of a sample that shall cost so much."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.data.published import Array
from minato_gpu import Pipeline
from minato_gpu.samples import sample_seed


def costs(dataset: Any, pipeline: Pipeline, indices: Iterable[int], repeats: int = 3) -> Array:
    """CPU seconds that this thread needs for each sample, with the draws of epoch 0; the least of ``repeats``.

    One pass over all samples after the other: a machine is slower for some seconds, now and then, and a sample's
    repetitions should not all fall into that.
    """
    chosen = list(indices)
    passes = [[_cost(dataset, pipeline, index) for index in chosen] for _ in range(repeats)]
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


def sizes_of_mixture(wanted: Array, curves: Sequence[tuple[float, Curve]], rounds: int = 60) -> Array:
    """Sizes, rising, whose costs have the distribution ``wanted`` (rising) when chance decides which curve holds.

    ``curves``: (probability, curve). Each round moves every size by what the mixture misses at its rank.
    """
    sizes = curves[0][1].sizes(wanted)
    ranks = (np.arange(len(wanted)) + 0.5) / len(wanted)
    for _ in range(rounds):
        found = np.concatenate([curve.seconds(sizes) for _, curve in curves])
        weights = np.concatenate([np.full(len(sizes), share / len(sizes)) for share, _ in curves])
        order = np.argsort(found, kind="stable")
        reached = np.cumsum(weights[order]) - weights[order] / 2
        mixed = np.interp(ranks, reached, found[order])
        sizes = np.clip(np.sort(sizes * np.sqrt(wanted / mixed)), *curves[0][1].limits)
    return sizes
