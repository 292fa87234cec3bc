"""The table of CoorDL (Mohan et al., VLDB 2021), with sizes divided by 10,000 and storage that gives 4 MB/s.

    found    what this loader does, or a simulated cache of files that have one size; misses are those of the second and
             third epoch
    paper    what was measured there: two servers with 500 GiB, of which the data set was 1 / 0.35 or 1 / 0.65

``page cache``: Linux's two lists and refault distance, with as many gigabytes as the paper's servers have; ``lru``: one
list; ``minio``: the policy of production. ``what if``: by how much the predicted epoch differs from the measured one.
Two servers with 65 % each are the first case of ``benchmarks.peer_epochs``.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from math import isqrt
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks import report
from benchmarks.cache_replay import Shuffles, replay
from benchmarks.isolate import isolated
from benchmarks.node_prepared import EIGHT as PREPARING
from benchmarks.node_prepared import prepared
from benchmarks.node_share import EIGHT as READING
from benchmarks.node_share import shared
from benchmarks.storage import Declared
from benchmarks.throttle import Throttle, server
from minato_gpu import DataLoader
from minato_gpu.caching.future import Integers
from minato_gpu.lab.analysis.predict import DrawnCosts, SimulatedRank
from minato_gpu.lab.analysis.profile import Profile, Storage
from minato_gpu.sources.blocks import space_of

_EPOCHS, _KEYS, _GIGABYTES = 3, 16_000, 500
_NBYTES, _BATCH, _WORKERS, _LATENCY_MS, _RATE, _PREPARE_S = 50_000, 16, 2, 5.0, 4e6, 10e-3
_SETS = {0.35: 314, 0.65: 1290}  # objects of 50 KB: ImageNet-1k (146 GiB), OpenImages (645 GB)
_PAPER = {  # misses: of the page cache, and of CoorDL
    0.35: {"lru": None, "page cache": 0.85, "minio": 0.65, "this loader": 0.65},
    0.65: {"lru": None, "page cache": 0.53, "minio": 0.35, "this loader": 0.35},
}


@report.benchmark("coordl", 1)
def main(quick: bool, repetitions: int) -> Iterator[dict[str, Any]]:
    for share, paper in _PAPER.items():
        report.progress(f"{share:.0%} cached")
        what = f"misses, {share:.0%} cached"
        for policy, missed in simulated_misses(400 if quick else _KEYS, share).items():
            yield _row(what, f"{policy}, simulated", paper[policy]) | {"found": missed}
        count, rate = (64, 10 * _RATE) if quick else (_SETS[share], _RATE)
        runs = [isolated(measure, count, share, rate, timeout_s=600.0) for _ in range(repetitions)]
        misses = [each.reads / count for each in runs]
        yield _row(what, "this loader", paper["this loader"]) | report.summarise("found", misses)
        off = [abs(each.seconds / predicted_s(count, share, rate, each.prepare_s) - 1) for each in runs]
        yield _row(f"what if, {share:.0%} cached: off by", "this loader", 0.04) | report.summarise("found", off)
    for row in shared(quick=quick, repetitions=repetitions, cases=READING, samples=600):
        paper_times = 1.0 if "share" in row["loader"] else 7.0
        yield _row("eight jobs: times the set is read", row["loader"], paper_times) | _found(row, "times_read")
    for row in prepared(steps=4 if quick else 60, repetitions=repetitions, cases=PREPARING):
        yield _row("eight jobs: times it is prepared", row["loader"]) | _found(row, "prepared_share")
        yield _row("eight jobs: CPU, ms a sample", row["loader"]) | _found(row, "cpu_s")


def _row(what: str, by: str, paper: float | None = None) -> dict[str, Any]:
    return {"what": what, "by": by, "paper": paper}


def _found(row: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns a figure of a row as ``found``."""
    return {"error": row["error"]} if "error" in row else {"found": row[name]}


# --- simulated caches -------------------------------------------------------------------------------------------------


def simulated_misses(keys: int, cache_share: float) -> dict[str, float]:
    """Share of misses of each policy, after the first epoch."""
    orders, room = Shuffles(keys, 1, 0), int(cache_share * keys)
    epochs = [orders.order(epoch) for epoch in range(_EPOCHS)]
    hits = {
        "lru": hit_rates(Lru(room), epochs),
        "page cache": hit_rates(PageCache(room, _GIGABYTES), epochs),
        "minio": [len(hit) / keys for hit in replay("minio", orders, cache_share, _EPOCHS)],
    }
    return {policy: 1 - float(np.mean(found[1:])) for policy, found in hits.items()}


class Lru:
    """Room for so many files of equal size, of which the one that was used longest ago is evicted."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._kept: OrderedDict[int, None] = OrderedDict()

    def read(self, key: int) -> bool:
        """Reads a file; returns whether it was there."""
        there = key in self._kept
        self._kept[key] = None
        self._kept.move_to_end(key)
        if len(self._kept) > self._room:
            self._kept.popitem(last=False)
        return there


class PageCache:
    """Linux's page cache with room for ``room`` files of equal size, whose size in gigabytes is ``gigabytes``: an
    inactive and an active list, and the refault distance (mm/workingset.c, as of Linux 6).

    A file that is read for the first time enters the inactive list; a second read there makes it active. Evicted is the
    oldest inactive one. One that comes back is active at once if no more files were evicted or made active since it
    went than the active list has. Whenever that has happened, or the inactive list is short, active files become
    inactive as both lists are scanned, the oldest first. A whole file is read at once, without being mapped.
    """

    def __init__(self, room: int, gigabytes: float) -> None:
        self._room = room
        self._most_active = max(1, isqrt(int(10 * gigabytes)))  # times the inactive list
        self._inactive: OrderedDict[int, bool] = OrderedDict()  # whether it was used since it entered; oldest first
        self._active: OrderedDict[int, bool] = OrderedDict()
        self._age = 0  # evictions and activations
        self._evicted: dict[int, int] = {}  # at which age
        self._refaulted = False  # to the active list, since the last eviction
        self._to_scan = 0.0  # active files

    def read(self, key: int) -> bool:
        """Reads a file; returns whether it was there."""
        if key in self._active:
            self._active[key] = True
            return True
        if key in self._inactive:
            if self._inactive[key]:
                del self._inactive[key]
                self._active[key] = False
                self._age += 1
            else:
                self._inactive[key] = True
            return True
        if len(self._inactive) + len(self._active) >= self._room:
            self._evict()
        evicted = self._evicted.pop(key, None)
        if evicted is not None and self._age - evicted <= len(self._active):
            self._active[key] = self._refaulted = True
            self._age += 1
        else:
            self._inactive[key] = True
        return False

    def _evict(self) -> None:
        if self._refaulted or len(self._inactive) * self._most_active < len(self._active):
            self._to_scan += len(self._active) / max(1, len(self._inactive))
        while self._active and (self._to_scan >= 1 or not self._inactive):
            key, used = self._active.popitem(last=False)
            self._inactive[key] = used
            self._to_scan = max(0.0, self._to_scan - 1)
        self._refaulted = False
        key, _ = self._inactive.popitem(last=False)
        self._evicted[key] = self._age
        self._age += 1


def hit_rates(cache: Lru | PageCache, epochs: Sequence[Integers]) -> list[float]:
    """Hit rate of each epoch of one reader, of which the keys are given in their order."""
    return [sum(map(cache.read, keys.tolist())) / len(keys) for keys in epochs]


# --- epochs through the loader, and their prediction ------------------------------------------------------------------


class Objects(Declared):
    """``took_s``: what each has taken its worker last."""

    def __init__(self, address: str, count: int) -> None:
        super().__init__(address, _PREPARE_S, count, _NBYTES)
        self.took_s = np.frombuffer(mmap.mmap(-1, 8 * count), np.float64)  # workers share it

    def __getitem__(self, key: int) -> NDArray[np.int64]:
        begin = perf_counter()
        sample = super().__getitem__(key)
        self.took_s[key] = perf_counter() - begin
        return sample


class Measured(NamedTuple):
    """Seconds and reads of an epoch after the first, on average; seconds of a worker for a sample."""

    seconds: float
    reads: float
    prepare_s: float


def measure(count: int, share: float, rate: float) -> Measured:
    """One rank, whose memory has room for a share of so many objects."""
    with server(Throttle(_LATENCY_MS, rate=rate), _NBYTES) as address:
        objects, ends, reads = Objects(address, count), [], []
        room = round(share * count) * space_of(_NBYTES)
        arguments: dict[str, Any] = {"shuffle": True, "persistent_workers": True, "cache": room}
        loader: Any = DataLoader(objects, _BATCH, num_workers=_WORKERS, **arguments)  # type: ignore[arg-type]
        for _ in range(_EPOCHS):
            keys = sorted(int(key) for batch in loader for key in batch[:, 0])
            ends.append(perf_counter())
            reads.append(loader.stats()["reads"]["reads"])
            if keys != list(range(count)):
                raise AssertionError("samples are lost or doubled")
    later = _EPOCHS - 1
    return Measured((ends[-1] - ends[0]) / later, (reads[-1] - reads[0]) / later, float(objects.took_s.mean()))


def predicted_s(count: int, share: float, rate: float, prepare_s: float) -> float:
    """Seconds of an epoch after the first, simulated; which samples are kept is drawn, eight times."""
    storage = Storage(rate, _LATENCY_MS / 1e3, 1.0, _NBYTES, 1.0)
    way: dict[str, Any] = {"loader": "minato_gpu", "in_order": True, "max_lateness": 0, "persistent": True}
    way |= {"samples": count, "batch_size": _BATCH, "workers": _WORKERS, "prefetch": 2, "storage": storage}
    way |= {"rank": 0, "ranks": 1, "cores": _WORKERS, "prepare_s": (prepare_s,), "step_s": (0.0,)}
    way |= dict.fromkeys(("prepare_cpu_share", "collate_s", "transfer_s", "loader_s", "startup_s"), 0.0)
    profile = Profile(**way)
    drawn = DrawnCosts(np.full(count, prepare_s), np.zeros((_EPOCHS, profile.batches)))
    rank = SimulatedRank(profile, share, steps=False)
    return float(np.mean([rank.simulated(drawn, seed).seconds[1:] for seed in range(8)]))


if __name__ == "__main__":
    main()
