"""The loaders that are compared, each by an adapter with one face (``base.Loader``)."""

from __future__ import annotations

from benchmarks.peers.base import Chosen, Job, Loader, Reader, choose, installed
from benchmarks.peers.minato import Minato
from benchmarks.peers.pytorch import PyTorch
from benchmarks.peers.spdl import SpdlPool, SpdlSharded, SpdlSubprocess
from benchmarks.peers.torchdata import TorchdataNodes

COSTLY: tuple[Loader, ...] = (
    PyTorch("pytorch in order"),
    PyTorch("pytorch prefetch 8", prefetch_factor=8),
    PyTorch("pytorch out of order", in_order=False),
    PyTorch("pytorch out of order, prefetch 8", in_order=False, prefetch_factor=8),
    SpdlPool("spdl processes", processes=True, concurrency=4),
    SpdlPool("spdl processes in order", processes=True, in_order=True, concurrency=32),
    SpdlPool("spdl threads", processes=False),
    SpdlSubprocess("spdl threads in a subprocess"),
    TorchdataNodes("torchdata processes", processes=True),
    TorchdataNodes("torchdata processes in order", processes=True, in_order=True),
    TorchdataNodes("torchdata threads", processes=False),
    Minato("minato_gpu in order"),
    Minato("minato_gpu bounded", in_order=False),
)
"""For samples whose cost is what counts: every loader works sample by sample where it can."""

TRIVIAL: tuple[Loader, ...] = (
    PyTorch("pytorch in order"),
    PyTorch("pytorch prefetch 8", prefetch_factor=8),
    PyTorch("pytorch out of order", in_order=False),
    SpdlPool("spdl processes", processes=True, by_batch=True, concurrency=4),
    SpdlPool("spdl threads", processes=False, by_batch=True),
    SpdlSubprocess("spdl threads in a subprocess", by_batch=True),
    SpdlSharded("spdl plain subprocesses"),
    TorchdataNodes("torchdata processes", processes=True, by_batch=True, prefetch=0),
    TorchdataNodes("torchdata threads", processes=False, by_batch=True, prefetch=0),
    Minato("minato_gpu in order"),
    Minato("minato_gpu bounded", in_order=False),
)
"""For samples that cost next to nothing: every loader works batch by batch where it can."""

__all__ = ["COSTLY", "TRIVIAL", "Chosen", "Job", "Loader", "Reader", "choose", "installed"]
