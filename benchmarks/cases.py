"""The cases of the tail benchmark: which samples cost what, in which batches, for how many epochs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]

# Preprocessing time of a sample of KiTS19 (MinatoLoader, table of section 2): least, median, 75th and 90th
# percentile, most, in milliseconds.
_KITS19_QUANTILES = (0.0, 0.5, 0.75, 0.9, 1.0)
_KITS19_MS = (10.0, 470.0, 630.0, 750.0, 2230.0)
_KITS19_SCALE = 1 / 160


@dataclass(frozen=True)
class Case:
    """``costs(samples, workers, rng)`` is each sample's cost in milliseconds of one core.

    ``load`` is the consumer's demand: the work takes ``load`` times as long on all cores as the emulated steps do.
    ``words`` 64-bit integers make one sample. ``epochs`` are timed, after one that is not. ``trivial``: most samples
    cost so little that the peers are best off working batch by batch.
    """

    name: str
    costs: Callable[[int, int, np.random.Generator], Costs]
    samples: int
    batch_size: int
    load: float
    words: int = 18_816  # 147 KiB: 224 x 224 pixels of three bytes
    epochs: int = 1
    trivial: bool = False
    quick_samples: int = 48
    quick_epochs: int = 1

    def operations(self, samples: int, workers: int, per_ms: float) -> NDArray[np.int64]:
        """Units of work of each sample; the same on every call. At least one each."""
        costs = self.costs(samples, workers, np.random.default_rng(11))
        return np.maximum(1, np.rint(costs * per_ms)).astype(np.int64)


def scattered(samples: int, workers: int, rng: np.random.Generator) -> Costs:
    """5 % of the samples, anywhere, take 120 ms; the others 3 ms."""
    costs = np.full(samples, 3.0)
    costs[rng.choice(samples, max(1, round(0.05 * samples)), replace=False)] = 120.0
    return costs


def bursts(samples: int, workers: int, rng: np.random.Generator) -> Costs:
    """As many slow samples as ``scattered``, but in bursts of twice the worker count, evenly over the epoch."""
    costs = np.full(samples, 3.0)
    length = 2 * workers
    count = max(1, round(0.05 * samples / length))
    for start in np.linspace(0, samples - length, count + 2).astype(int)[1:-1]:
        costs[start : start + length] = 120.0
    return costs


def kits19(samples: int, workers: int, rng: np.random.Generator) -> Costs:
    """KiTS19's preprocessing times, a hundred and sixtieth of them: linear between the published percentiles."""
    return np.interp(rng.random(samples), _KITS19_QUANTILES, _KITS19_MS) * _KITS19_SCALE


def rare(samples: int, workers: int, rng: np.random.Generator) -> Costs:
    """0.1 % of otherwise trivial samples (0.02 ms) take a thousand times as long, which nothing foretells."""
    costs = np.full(samples, 0.02)
    costs[rng.choice(samples, max(1, round(0.001 * samples)), replace=False)] = 20.0
    return costs


CASES = (
    Case("scattered, 105 %", scattered, 1500, 16, load=1.05),
    Case("scattered, 81 %", scattered, 1500, 16, load=0.81),
    Case("bursts, 105 %", bursts, 1500, 16, load=1.05),
    Case("bursts, 81 %", bursts, 1500, 16, load=0.81),
    Case("short epochs, 105 %", kits19, 168, 3, load=1.05, epochs=40, quick_samples=12, quick_epochs=3),
    Case("short epochs, 81 %", kits19, 168, 3, load=0.81, epochs=40, quick_samples=12, quick_epochs=3),
    Case("rare, 81 %", rare, 24_000, 64, load=0.81, words=1536, trivial=True, quick_samples=1024),
)
