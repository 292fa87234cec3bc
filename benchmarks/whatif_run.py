"""One loader in one setting, and the profile that settings are predicted from, for ``benchmarks.whatif``.

Real files of a workload lie behind a throttled server. A run tells seconds and requests of each epoch, what each sample
cost its worker, what steps and the loader took on the consumer's thread. Every sample must be delivered once.

The profile is measured by a few runs. Warm: all bytes kept in memory. Costs of samples and the rate with two workers,
and with another count of them; steps that take twice as long as preparing, so that what ``next`` takes is the loader's
own. Cold: nothing is prepared, so that an epoch takes what reading does. Apart: nothing is prepared and nothing read,
and no epoch begins before the last one has ended, so that its first batch takes what beginning does. These runs take
turns with the settings that are to be predicted, and those are predicted from nothing else: what happens to the machine
meanwhile happens to all of them.
"""

from __future__ import annotations

import http.client
import mmap
import os
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter, sleep, thread_time
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler, RandomSampler

from benchmarks import report
from benchmarks.compare.workloads import INDEX, SETTINGS, with_index
from benchmarks.data.__main__ import WORKLOADS
from minato_gpu import DataLoader, Pipeline, Source, read_bytes
from minato_gpu.lab.analysis.profile import Profile, Storage
from minato_gpu.lab.analysis.virtual_storage import Tier
from minato_gpu.sources import process
from minato_gpu.sources.blocks import space_of
from minato_gpu.util.threads import usable_cores

Floats = NDArray[np.float64]
_PATHS = ("path", "label_path")
PREFETCH = 2
_BATCHES = 16  # of an epoch, at least
_LARGEST = 16
LATENCY_MS = 2.0
_LONG_MS = 30.0
_REQUESTS = 48
_ENDLESS = 1e10  # bytes a second
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
    takes.
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
    """The workload's samples: their files come from the server, preparing one takes ``slept`` seconds, slept."""

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
        for source in self.source(index):
            read_bytes(source)
        sleep(max(0.0, begin + self.slept[index] - perf_counter()))
        self.log[:, index] += perf_counter() - begin, thread_time() - computed, 1
        return {INDEX: np.int64(index)}

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


def written(name: str, folder: Path, count: int) -> Data:
    """The workload's files in the folder, made where they are not there."""
    where = folder / f"{name}-{count}"
    if not where.is_dir():
        report.progress(f"{name}: writing {count} samples")
        made = where.with_name(f".{where.name}-{os.getpid()}")
        made.mkdir(parents=True)
        for _ in WORKLOADS[name].write(made, count, 0):
            pass
        made.rename(where)
    files = len(WORKLOADS[name].dataset(where))
    return Data(name, where, min(SETTINGS[name].batch_size, _LARGEST, max(1, files // _BATCHES)))


# --- the profile -----------------------------------------------------------------------------------------------------


class Beyond(NamedTuple):
    """What a profile does not tell, in seconds. ``sleep_s``: that a step's sleep takes too long; ``between_s``: that
    an epoch takes to begin, where that waits for the end of the one before."""

    sleep_s: float
    between_s: float


def profile_ways(data: Data, base: Way, costs_s: Sequence[float], *, quick: bool) -> dict[str, Way]:
    """The runs that make a profile. ``costs_s``: of the samples, about."""
    warm = replace(base, cache=WARM, epochs=1 if quick else 4)
    nothing = (1e-6,) * len(costs_s)
    other = 4 * base.workers
    return {
        "warm": warm,
        "other": replace(warm, workers=other),
        "stepping": replace(warm, step_s=2 * data.batch * float(np.mean(costs_s)) / base.workers),
        "cold": Way(shards=2, epochs=warm.epochs, slept=nothing),
        "apart": Way(shards=2, cache=WARM, filling=3, epochs=warm.epochs, slept=nothing),
    }


def profile_of(
    data: Data, samples: int, ways: Mapping[str, Way], runs: Mapping[str, Sequence[Measured]], storage: Storage
) -> tuple[Profile, Beyond]:
    """The profile of the setting "warm", of each way the run in the middle: one alone may be disturbed, and all
    predictions with it. ``samples``: of an epoch; costs may be known of fewer, as some were prepared ahead of it."""
    names = "warm", "other", "stepping", "cold", "apart"
    warm, other, stepping, cold, apart = (_middle(runs[name]) for name in names)
    base = ways["warm"]
    reading_s = float(np.median(cold.seconds)) / cold.reads
    scaling = {ways[name].workers: _rate(samples, run) for name, run in (("warm", warm), ("other", other))}
    profile = Profile(
        loader="minato_gpu",
        samples=samples,
        batch_size=data.batch,
        workers=base.workers,
        prefetch=PREFETCH,
        in_order=True,
        max_lateness=0,
        rank=0,
        ranks=1,
        cores=usable_cores(),
        prepare_s=tuple(warm.costs_s),
        prepare_cpu_share=min(1.0, float(np.sum(warm.computed_s) / np.sum(warm.costs_s))),
        collate_s=0.0,
        step_s=(0.0,),
        transfer_s=0.0,
        loader_s=float(np.median(stepping.waits_s)),
        startup_s=warm.start_s,
        storage=replace(storage, cpu_s=reading_s),
        scaling=tuple(sorted(scaling.items())),
        persistent=True,
        overlap=True,
        between_s=_between_s(stepping),
    )
    sleep_s = float(np.median(stepping.steps_s)) - ways["stepping"].step_s
    return profile, Beyond(sleep_s, _between_s(apart))


def _between_s(run: Measured) -> float:
    return max(0.0, float(np.median(run.between_s) - np.median(run.waits_s)))


def _middle(runs: Sequence[Measured]) -> Measured:
    return sorted(runs, key=lambda run: float(np.median(run.seconds)))[(len(runs) - 1) // 2]


def _rate(samples: int, run: Measured) -> float:
    return samples / float(np.median(run.seconds))


def measured_storage(data: Data, address: str) -> Storage:
    """What the server does: the latency of requests, one after the other over one connection. How much it differs is
    measured where it is long, beside what the machine's own work adds: that part does not change the order of answers.
    """
    dataset = Stored(data, address)
    sizes = dataset.sizes()
    paths = [urlsplit(source.path).path for index in range(len(sizes)) for source in dataset.source(index)]
    waits = _first_bytes(address, paths[:_REQUESTS], LATENCY_MS)
    long_waits = np.log(_first_bytes(address, paths[:_REQUESTS], _LONG_MS))
    return Storage(
        bytes_per_s=_ENDLESS,
        latency_s=float(np.median(waits)),
        requests=float(dataset.parts),
        nbytes=float(np.mean(sizes)),
        concurrency=1.0,
        sizes=tuple(sizes),
        spread=float(np.diff(np.quantile(long_waits, [0.16, 0.84]))[0]) / 2,
        remote=True,
        shares=dataset.shares(),
    )


def _first_bytes(address: str, paths: Sequence[str], latency_ms: float) -> list[float]:
    """Seconds until each is there; the server has read them all before."""
    urllib.request.urlopen(f"{address}/set?latency_ms={latency_ms}&rate=None").close()
    at = urlsplit(address)
    connection = http.client.HTTPConnection(str(at.hostname), at.port)
    times = []
    for path in (*paths, *paths):
        begin = perf_counter()
        connection.request("GET", path, headers={"Range": "bytes=0-0"})
        connection.getresponse().read()
        times.append(perf_counter() - begin)
    connection.close()
    return times[len(paths) :]
