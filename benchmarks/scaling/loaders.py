"""The loaders that are compared on how they scale with workers, the peers at their best.

Tried and left out: SPDL's plain subprocesses, the best for trivial samples, start their shards of an epoch one after
another, which takes the time of a batch for each (0.6 of the bound with 8 workers, 0.16 with 32); threads, because they
would sleep side by side as they could not work.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.peers import Loader
from benchmarks.peers.minato import Minato
from benchmarks.peers.pytorch import PyTorch
from benchmarks.peers.spdl import SpdlPool
from benchmarks.peers.torchdata import TorchdataNodes
from benchmarks.scaling.cells import TAILED, Cell

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
