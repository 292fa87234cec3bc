"""Who is compared, with the settings that are tried for each before its figures count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.compare.dali import DaliReaders
from benchmarks.peers import Loader
from benchmarks.peers.minato import Minato
from benchmarks.peers.pytorch import PyTorch
from benchmarks.peers.spdl import SpdlPool
from benchmarks.peers.torchdata import TorchdataNodes

CANDIDATES: Mapping[str, Sequence[Loader]] = {
    "pytorch in order": [PyTorch("pytorch in order", prefetch_factor=factor) for factor in (2, 4, 8)],
    "pytorch out of order": [
        PyTorch("pytorch out of order", in_order=False, prefetch_factor=factor) for factor in (2, 4, 8)
    ],
    "torchdata in order": [
        TorchdataNodes("torchdata in order", processes=processes, in_order=True, prefetch=prefetch)
        for processes in (True, False)
        for prefetch in (2, 4)
    ],
    "torchdata out of order": [
        TorchdataNodes("torchdata out of order", processes=processes, prefetch=prefetch)
        for processes in (True, False)
        for prefetch in (2, 4)
    ],
    "spdl in order": [
        SpdlPool("spdl in order", processes=processes, in_order=True, concurrency=concurrency)
        for processes in (True, False)
        for concurrency in (None, 8, 32)
    ],
    "spdl out of order": [
        SpdlPool("spdl out of order", processes=processes, concurrency=concurrency)
        for processes in (True, False)
        for concurrency in (None, 8)
    ],
    "dali readers": [DaliReaders("dali readers", prefetch=prefetch) for prefetch in (1, 2, 3)],
    "minato_gpu in order": [Minato("minato_gpu in order")],
    "minato_gpu bounded": [Minato("minato_gpu bounded", in_order=False)],
    "minato_gpu pipeline, cpu": [Minato("minato_gpu pipeline, cpu", lanes=("cpu",))],
    "minato_gpu pipeline, device": [Minato("minato_gpu pipeline, device", lanes=("device",))],
    "minato_gpu pipeline, hybrid": [Minato("minato_gpu pipeline, hybrid", lanes=("cpu", "device"))],
    "minato_gpu pipeline, hybrid bounded": [
        Minato("minato_gpu pipeline, hybrid bounded", in_order=False, lanes=("cpu", "device"))
    ],
}
"""Loaders by name; the fastest candidate without a step is the one that is compared."""
