"""One loader in one setting, as ``benchmarks.whatif`` measures it: real files of a workload behind a throttled server.

A run tells seconds and requests of each epoch, what each sample cost its worker, what steps and the loader took on the
consumer's thread. Every sample must be delivered once.
"""

from __future__ import annotations

import mmap
import os
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, sleep, thread_time
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler, RandomSampler

from benchmarks.compare.workloads import INDEX, SETTINGS, with_index
from benchmarks.data.__main__ import WORKLOADS
from minato_gpu import DataLoader, Pipeline, Source, read_bytes
from minato_gpu.lab.analysis.virtual_storage import Tier
from minato_gpu.samples import sample_seed
from minato_gpu.sources import process
from minato_gpu.sources.blocks import space_of

Floats = NDArray[np.float64]
_PATHS = ("path", "label_path")
PREFETCH = 2
WARM = 1.3  # share: all of the set, whatever blocks take


@dataclass(frozen=True)
class Data:
    """A workload's files. ``batch``: of samples."""

    name: str
    folder: Path
    batch: int


@dataclass(frozen=True)
class Way:
    """How the data are read. ``rate``: of the storage, bytes a second; ``cache``: share of the set that memory keeps;
    ``policy``: of that (empty: as the loader chooses); ``shards``: an epoch reads one sample in so many; ``step_s``:
    what the consumer sleeps for a batch; ``filling``: epochs that do not count. ``slept``: what preparing each sample
    takes, slept instead of computed.
    """

    workers: int = 2
    rate: float | None = None
    latency_ms: float = 0.0
    cache: float | None = None
    policy: str = ""
    shards: int = 1
    step_s: float = 0.0
    filling: int = 1
    epochs: int = 2
    slept: tuple[float, ...] = ()


class Measured(NamedTuple):
    """Of the epochs that count, but for ``start_s``: the first batch of all. ``reads``: of a mean epoch; ``costs_s``,
    ``computed_s``: of each sample that was prepared, wall and CPU seconds of its worker; ``steps_s``: of each batch;
    ``waits_s``: of ``next``, but for an epoch's first, which are ``between_s``.
    """

    seconds: list[float]
    reads: float
    start_s: float
    costs_s: list[float]
    computed_s: list[float]
    steps_s: list[float]
    waits_s: list[float]
    between_s: list[float]


class Stored:
    """The workload's samples: their files come from the server, their preparation is the pipeline's, or slept."""

    def __init__(self, data: Data, address: str, slept: tuple[float, ...] = ()) -> None:
        self.files = WORKLOADS[data.name].dataset(data.folder)
        self.pipeline: Pipeline = with_index(WORKLOADS[data.name].pipeline(data.folder))
        self.slept = slept
        self._from, self._to = str(data.folder), f"{address}/files"
        self.log = np.frombuffer(mmap.mmap(-1, 24 * len(self.files)), np.float64).reshape(3, -1)

    def __len__(self) -> int:
        return len(self.files)

    def source(self, index: int) -> tuple[Source, ...]:
        """Where the files lie: on the server."""
        item = self.files[index]
        return tuple(Source(self._url(item[name])) for name in _PATHS if name in item)

    def _url(self, path: str) -> str:
        return self._to + path.removeprefix(self._from)

    def __getitem__(self, index: int) -> dict[str, Any]:
        begin, computed = perf_counter(), thread_time()
        if self.slept:
            for source in self.source(index):
                read_bytes(source)
            sleep(max(0.0, begin + self.slept[index] - perf_counter()))
            sample: dict[str, Any] = {INDEX: np.int64(index)}
        else:
            item = {**self.files[index], INDEX: np.int64(index)}
            item |= {name: self._url(item[name]) for name in _PATHS if name in item}
            sample = dict(self.pipeline.run(item, sample_seed(0, 0, index, 0)))
        self.log[:, index] += perf_counter() - begin, thread_time() - computed, 1
        return sample

    def sizes(self) -> list[int]:
        """Bytes of each sample's files."""
        return [sum(some) for some in self._sizes()]

    def shares(self) -> tuple[float, ...]:
        """Of all bytes, those of each file of a sample."""
        by_part = np.array(self._sizes()).sum(axis=0)
        return tuple((by_part / by_part.sum()).tolist())

    def _sizes(self) -> list[list[int]]:
        items = (self.files[index] for index in range(len(self)))
        return [[Path(item[name]).stat().st_size for name in _PATHS if name in item] for item in items]

    @property
    def parts(self) -> int:
        """Files of a sample."""
        return len(self.source(0))


def budget(sizes: list[int], parts: int, share: float) -> int:
    """Bytes of memory for a share of the set."""
    return round(share * sum(parts * space_of(size // parts) for size in sizes))


@contextmanager
def deciding(policy: str) -> Iterator[None]:
    """The reader process, forked meanwhile, keeps what this policy says. This process is for nothing else."""
    ours: Any = process
    before = ours.MemoryTier
    if policy:
        ours.MemoryTier = partial(before, decide=Tier(0.0, policy).decide)
    try:
        yield
    finally:
        ours.MemoryTier = before


def measure(data: Data, way: Way, address: str, seed: int = 0) -> Measured:
    """Epochs of one loader, from the server there, in a process of its own. ``seed``: of orders that none foretells."""
    torch.set_num_threads(1)
    urllib.request.urlopen(f"{address}/set?latency_ms={way.latency_ms}&rate={way.rate}").close()
    with deciding(way.policy):
        dataset: Any = Stored(data, address, way.slept)
        shared = way.shards > 1
        orders = torch.Generator().manual_seed(seed)
        sampler: Any = (
            DistributedSampler(dataset, way.shards, 0) if shared else RandomSampler(dataset, generator=orders)
        )
        kept: dict[str, Any] = (
            {} if way.cache is None else {"cache": max(1, budget(dataset.sizes(), dataset.parts, way.cache))}
        )
        loader: Any = DataLoader(
            dataset,
            data.batch,
            sampler=sampler,
            num_workers=way.workers,
            prefetch_factor=PREFETCH,
            epochs=way.filling + way.epochs + 1,
            collate_fn=None if way.slept else SETTINGS[data.name].collate,
            **kept,
        )
        return _epochs(loader, dataset, sampler, way)


def _epochs(loader: Any, dataset: Any, sampler: Any, way: Way) -> Measured:
    seconds: list[float] = []
    waits: list[list[float]] = []
    steps: list[float] = []
    keys: list[list[int]] = []
    reads = 0
    ended = perf_counter()
    for number in range(way.filling + way.epochs):
        if way.shards > 1:
            sampler.set_epoch(number)
        if number == way.filling:
            steps, reads = [], loader.stats()["reads"]["reads"]
            dataset.log[:] = 0
        begin = asked = ended  # what is done between epochs, workers use: it is part of the next one
        keys.append([])
        waited = []
        for batch in loader:
            got = perf_counter()
            waited.append(got - asked)
            keys[-1] += batch[INDEX].tolist()
            if way.step_s:
                sleep(way.step_s)
            asked = perf_counter()
            steps.append(asked - got)
        ended = perf_counter()
        seconds.append(ended - begin)
        waits.append(waited)
    reads = loader.stats()["reads"]["reads"] - reads
    count = -(-len(dataset) // way.shards)
    if any(len({*some}) != len(some) or len(some) != count for some in keys):
        raise AssertionError("other samples than the sampler's were delivered")
    called = dataset.log[2] > 0
    wall, computed = (dataset.log[row][called] / dataset.log[2][called] for row in (0, 1))
    counted = waits[way.filling :]
    later, firsts = [each for epoch in counted for each in epoch[1:]], [epoch[0] for epoch in counted]
    costs = wall.tolist(), computed.tolist()
    return Measured(seconds[way.filling :], reads / way.epochs, waits[0][0], *costs, steps, later, firsts)


def written(name: str, folder: Path, count: int, say: Callable[[str], None]) -> Data:
    """The workload's files in the folder, made where they are not there."""
    where = folder / f"{name}-{count}"
    if not where.is_dir():
        say(f"{name}: writing {count} samples")
        made = where.with_name(f".{where.name}-{os.getpid()}")
        made.mkdir(parents=True)
        for _ in WORKLOADS[name].write(made, count, 0):
            pass
        made.rename(where)
    files = len(WORKLOADS[name].dataset(where))
    return Data(name, where, min(SETTINGS[name].batch_size, _LARGEST, max(1, files // _BATCHES)))


_BATCHES = 16  # of an epoch, at least
_LARGEST = 16
