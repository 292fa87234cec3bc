"""The cells of the scaling benchmark: so many workers, samples of such costs, such a consumer; the loaders.

Samples sleep for their cost and then are an array. Sleeping takes no core, so that many workers fit on few: only what
loaders themselves spend is real.

Of the loaders tried and left out: SPDL's plain subprocesses, the best for trivial samples, start their shards of an
epoch one after another, which takes the time of a batch for each (0.6 of the bound with 8 workers, 0.16 with 32);
threads, because they would sleep side by side as they could not work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers import Job, Loader
from benchmarks.peers.minato import Minato
from benchmarks.peers.pytorch import PyTorch
from benchmarks.peers.spdl import SpdlPool
from benchmarks.peers.torchdata import TorchdataNodes
from benchmarks.work import TRIVIAL_WORDS, Costs, Slept, kits19

SPREADS = ("none", "half", "tail", "speech", "segmentation")
TAILED = SPREADS[2:]
"""The spreads that have a tail."""

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

    @property
    def name(self) -> str:
        name = f"{self.workers} x {self.cost_ms:g} ms, {self.spread}"
        return f"{name}, {100 * self.load:g} %" if self.load else name

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


def job(cell: Cell, samples: Slept) -> Job:
    """What a cell asks of a loader: several epochs, each in another order."""
    return Job(samples, BATCH_SIZE, cell.workers, 8 * TRIVIAL_WORDS, keep_workers=True, shuffle_seed=5)


# --- loaders, the peers at their best ---------------------------------------------------------------------------------


_BY_BATCH: tuple[Loader, ...] = (
    PyTorch("pytorch in order"),
    PyTorch("pytorch prefetch 8", prefetch_factor=8),
    PyTorch("pytorch out of order", in_order=False),
    SpdlPool("spdl processes by batch", processes=True, by_batch=True, calls_per_worker=2),
    SpdlPool("spdl processes by batch in order", processes=True, by_batch=True, in_order=True, calls_per_worker=2),
    TorchdataNodes("torchdata processes by batch", processes=True, by_batch=True, prefetch=0),
    TorchdataNodes("torchdata processes by batch in order", processes=True, by_batch=True, in_order=True, prefetch=0),
)
_BY_SAMPLE: tuple[Loader, ...] = (
    SpdlPool("spdl processes", processes=True, calls_per_worker=2),
    SpdlPool("spdl processes in order", processes=True, in_order=True, calls_per_worker=16),
    TorchdataNodes("torchdata processes", processes=True),
    TorchdataNodes("torchdata processes in order", processes=True, in_order=True),
)
LOADERS: tuple[Loader, ...] = (
    *_BY_BATCH,
    *_BY_SAMPLE,
    Minato("minato_gpu in order"),
    Minato("minato_gpu bounded", in_order=False),
)


def worth_trying(cell: Cell, loaders: Sequence[Loader]) -> list[Loader]:
    """Those that are somebody's best there: 0.4 ms of the training process for each sample pays at most for a tail."""
    return [each for each in loaders if cell.spread in TAILED or each not in _BY_SAMPLE]
