"""The cells of the scaling benchmark: so many workers, samples of such costs, such data, such a consumer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.tail_run import Costs, kits19

WORKERS = (2, 4, 8, 16, 32, 64)
COSTS_MS = (1.0, 3.0, 10.0, 30.0)
SPREADS = ("none", "half", "tail", "speech", "segmentation")
LOADS = (0.9, 1.05)
TAILED = SPREADS[2:]
"""The spreads whose targets are also for a consumer that trains."""

BATCH_SIZE = 64
_EPOCH_S = 2.5  # of an epoch at the bound, at least
_BATCHES_PER_WORKER = 6  # at least: else it counts most how an epoch's last batches happen to fall
_FASTEST = 16_000.0  # samples a second, about what loaders reach here: for the length of epochs alone
_SEED = 11

# LibriSpeech with a heavy step of 3 s on every fifth sample (MinatoLoader, table of section 2): the ranges of the four
# light ones and of the heavy one, in milliseconds.
_LIGHT_MS, _HEAVY_MS = (502.0, 514.0), (3002.0, 3017.0)


@dataclass(frozen=True)
class Cell:
    """``load``: the work takes so many times as long as the consumer's steps; 0: it takes batch after batch."""

    workers: int
    cost_ms: float
    spread: str
    load: float = 0.0
    kind: str = "arrays"

    @property
    def name(self) -> str:
        name = f"{self.workers} x {self.cost_ms:g} ms, {self.spread}"
        if self.load:
            name += f", {100 * self.load:g} %"
        return name if self.kind == "arrays" else f"{name}, {self.kind}"

    @property
    def samples(self) -> int:
        """Samples of an epoch: whole batches."""
        rate = min(1e3 * self.workers / self.cost_ms, _FASTEST)
        batches = max(round(_EPOCH_S * rate / BATCH_SIZE), _BATCHES_PER_WORKER * self.workers)
        return BATCH_SIZE * batches

    def costs_s(self, samples: int) -> NDArray[np.float64]:
        """Seconds that each of so many samples sleeps; their mean is exactly the cell's cost."""
        shape = _shape(self.spread, samples, np.random.default_rng(_SEED))
        return shape * (self.cost_ms / 1e3 / float(shape.mean()))


def _shape(spread: str, samples: int, rng: np.random.Generator) -> Costs:
    if spread == "none":
        return np.ones(samples)
    if spread == "half":
        return rng.uniform(0.5, 1.5, samples)
    if spread == "tail":  # 5 % of the samples are 40 times slower than the others
        costs = np.ones(samples)
        costs[rng.choice(samples, max(1, round(0.05 * samples)), replace=False)] = 40.0
        return costs
    if spread == "speech":
        costs = rng.uniform(*_LIGHT_MS, samples)
        costs[::5] = rng.uniform(*_HEAVY_MS, len(costs[::5]))
        return costs
    if spread == "segmentation":
        return kits19(samples, 0, rng)
    raise ValueError(f"spread must be one of {', '.join(SPREADS)}, got {spread!r}")


def matrix(
    workers: Sequence[int],
    costs_ms: Sequence[float],
    spreads: Sequence[str],
    loads: Sequence[float] = (0.0,),
    kinds: Sequence[str] = ("arrays",),
) -> list[Cell]:
    """Every combination."""
    return [Cell(*each) for each in itertools.product(workers, costs_ms, spreads, loads, kinds)]


NAMED: tuple[Cell, ...] = (
    Cell(2, 3, "half"),
    Cell(8, 1, "none"),
    Cell(8, 3, "none"),
    Cell(32, 3, "none"),
    Cell(32, 10, "none"),
    Cell(8, 3, "half"),
    Cell(16, 3, "half"),
    Cell(32, 3, "half"),
    Cell(8, 10, "half"),
    Cell(32, 10, "half"),
    Cell(64, 10, "half"),
    Cell(64, 30, "half"),
    Cell(8, 3, "tail", 0.9),
    Cell(32, 10, "tail", 1.05),
    Cell(8, 10, "speech", 1.05),
    Cell(32, 10, "speech", 0.9),
    Cell(8, 10, "segmentation", 0.9),
    Cell(32, 10, "segmentation", 1.05),
)
"""What is measured several times, interleaved."""

_LARGE_COST_MS = 30.0  # so that memory is not what limits samples of 600 KB
OTHER_KINDS: tuple[Cell, ...] = tuple(
    Cell(workers, _LARGE_COST_MS if kind == "tensors" else 10.0, "half", kind=kind)
    for kind in ("tensors", "ragged", "tokens", "getitems", "spawn", "replace", "budget")
    for workers in (8, 32)
)
"""Other data than arrays of one shape, and workers that are started or guarded in another way."""
