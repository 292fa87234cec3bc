"""The loaders that are compared on how they scale with workers, the peers at their best."""

from __future__ import annotations

from benchmarks.peers import Loader
from benchmarks.peers.minato import Minato
from benchmarks.peers.pytorch import PyTorch
from benchmarks.peers.spdl import SpdlPool, SpdlSharded
from benchmarks.peers.torchdata import TorchdataNodes

LOADERS: tuple[Loader, ...] = (
    PyTorch("pytorch in order"),
    PyTorch("pytorch prefetch 8", prefetch_factor=8),
    PyTorch("pytorch out of order", in_order=False),
    SpdlPool("spdl processes", processes=True, calls_per_worker=2),
    SpdlPool("spdl processes by batch", processes=True, by_batch=True, calls_per_worker=2),
    SpdlPool("spdl processes in order", processes=True, in_order=True, calls_per_worker=16),
    SpdlSharded("spdl plain subprocesses"),
    TorchdataNodes("torchdata processes", processes=True),
    TorchdataNodes("torchdata processes by batch", processes=True, by_batch=True, prefetch=0),
    TorchdataNodes("torchdata processes in order", processes=True, in_order=True),
    Minato("minato_gpu in order"),
    Minato("minato_gpu bounded", in_order=False),
)
