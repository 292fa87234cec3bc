"""Epochs over slow storage with a cache, beside what the policy says that they take.

A server gives its objects at so many bytes a second, all loaders together, after a few milliseconds each. Preparing a
sample takes a fixed time, most of which is slept. After a few epochs in which the cache fills:

    hit_rate, of_hits     share of the accesses that read nothing; and of the hits that the policy has, simulated
    epoch_s               seconds of an epoch
    least_s               what the misses take at the server's rate, or preparation if that is more

``one rank``: memory, the whole set each epoch. ``4 ranks, one directory``: processes that share a cache on disk, and
the data, as torch's ``DistributedSampler`` does. ``4 hosts``: the same, each with memory of its own. ``lru``: what a
page cache of as many bytes would leave PyTorch's loader to read, modelled.
"""

from __future__ import annotations

import mmap
import multiprocessing
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from benchmarks import report
from benchmarks.cache_replay import budget_of, policy_of, run_epoch
from benchmarks.isolate import isolated
from benchmarks.throttle import Throttle, content, server
from minato_gpu import DataLoader, Source, read_bytes
from minato_gpu.caching.choice import look_ahead
from minato_gpu.caching.orders import Orders
from minato_gpu.sampling.lookahead import DistributedOrders
from minato_gpu.sources.blocks import space_of
from minato_gpu.sources.disk.tier import DiskTier

NBYTES = 50_000
BATCH = 16
WORKERS = 2
LATENCY_MS = 5.0
RATE = 4e6  # bytes a second: so little that 17 processes, which stand for four hosts, have cores enough
PREPARE_S = 10e-3
SHARES = (0.25, 0.5, 0.75, 1.0)


class Objects:
    """Sample k is the first eight bytes of object k: int64 (1,). ``took_s``: what each has taken last."""

    def __init__(self, address: str, count: int, prepare_s: float) -> None:
        self.address, self.count, self.prepare_s = address, count, prepare_s
        self.took_s = np.frombuffer(mmap.mmap(-1, 8 * count), np.float64)  # workers share it

    def __len__(self) -> int:
        return self.count

    def source(self, key: int) -> Source:
        """The object."""
        return Source(f"{self.address}/{key}.bin", 0, NBYTES)

    def __getitem__(self, key: int) -> torch.Tensor:
        begin = perf_counter()
        data = read_bytes(self.source(key))
        if not np.array_equal(data, content(key, NBYTES)):
            raise AssertionError(f"object {key} has other bytes")
        sleep(self.prepare_s)
        self.took_s[key] = perf_counter() - begin
        return torch.tensor([key])


@dataclass(frozen=True)
class Case:
    """``ranks`` share each epoch; ``shared``: on one directory. ``rate``: of the storage, bytes a second."""

    name: str
    ranks: int
    shared: bool
    count: int
    share: float
    rate: float
    prepare_s: float
    filling: int
    epochs: int

    @property
    def shards(self) -> int:
        """Among how many caches the data is shared out."""
        return 1 if self.shared else self.ranks

    @property
    def on_disk(self) -> bool:
        """Whether copies lie in a directory, else in memory."""
        return self.shared and self.ranks > 1

    @property
    def policy(self) -> str:
        """What the loader chooses."""
        return "next-use" if self.shards > 1 and self.share < 1 else "minio"

    def orders(self, rank: int) -> Orders:
        """Of one rank."""
        return DistributedOrders(self.count, True, False, 0, rank, self.ranks, 0, 1)


class Measured(NamedTuple):
    """Of the epochs that count: seconds of each, and reads of each, all ranks together; what a sample took its worker,
    on average; of how many of all objects there were copies in the directory at the end, if there was one."""

    seconds: list[float]
    reads: list[int]
    prepare_s: float
    kept_share: float | None = None


def measure(case: Case) -> Measured:
    """All ranks, in processes of their own."""
    context = multiprocessing.get_context("fork")  # this one has no threads
    with tempfile.TemporaryDirectory() as directory, server(Throttle(LATENCY_MS, rate=case.rate), NBYTES) as address:
        barrier = context.Barrier(case.ranks)
        pipes = [context.Pipe() for _ in range(case.ranks)]
        ranks = [
            context.Process(target=_rank, args=(case, rank, address, directory, barrier, pipes[rank][1]))
            for rank in range(case.ranks)
        ]
        for process in ranks:
            process.start()
        found = []
        for ours, theirs in pipes:
            theirs.close()
            found.append(ours.recv())
        for process in ranks:
            process.join()
        copies = _copies(Path(directory) / "cache") if case.on_disk else None
    seconds = [max(times) for times in zip(*(each.seconds for each in found), strict=True)]
    reads = [sum(some) for some in zip(*(each.reads for each in found), strict=True)]
    prepare_s = float(np.mean([each.prepare_s for each in found]))
    return Measured(seconds, reads, prepare_s, None if copies is None else copies / case.count)


def _copies(directory: Path) -> int:
    tier = DiskTier(directory, None)
    copies = sum(1 for _ in tier.entries())
    tier.close()
    return copies


def _rank(case: Case, rank: int, address: str, directory: str, barrier: Any, end: Connection) -> None:
    objects = Objects(address, case.count, case.prepare_s)
    kept: dict[str, Any] = {"cache": round(case.share * case.count) * space_of(NBYTES)}
    if case.on_disk:
        kept = {"cache": budget_of(round(case.share * case.count), NBYTES), "cache_dir": Path(directory) / "cache"}
    sampler = DistributedSampler(objects, case.ranks, rank)  # type: ignore[arg-type,var-annotated]
    loader: Any = DataLoader(
        objects,  # type: ignore[arg-type]
        BATCH,
        sampler=sampler,
        num_workers=WORKERS,
        persistent_workers=True,
        **kept,
    )
    seconds, reads = [], [0]
    for epoch in range(case.filling + case.epochs):
        sampler.set_epoch(epoch)
        barrier.wait()
        begin = perf_counter()
        keys = sorted(int(key) for batch in loader for key in batch)
        seconds.append(perf_counter() - begin)
        if keys != sorted(sampler):
            raise AssertionError("other samples than the sampler's were delivered")
        barrier.wait()
        reads.append(loader.stats()["reads"]["reads"])
    prepare_s = float(objects.took_s[objects.took_s > 0].mean())
    end.send(Measured(seconds[case.filling :], np.diff(reads)[case.filling :].tolist(), prepare_s))
    end.close()


def expected_reads(case: Case, policy: str) -> list[int]:
    """Of each epoch that counts, by the policies that run in production, simulated."""
    total = np.zeros(case.filling + case.epochs, int)
    if case.shards == 1:  # whoever reads: together they read the whole set
        shares: list[Orders] = [DistributedOrders(case.count, True, False, 0, 0, 1, 0, 1)]
    else:
        shares = [case.orders(rank) for rank in range(case.ranks)]
    for orders in shares:
        kept = policy_of(policy, round(case.share * case.count), case.count)
        for epoch in range(case.filling + case.epochs):
            start = kept.begin(epoch, orders, look_ahead(case.shards, case.share))
            order = orders.order(epoch)
            assert order is not None
            total[epoch] += len(order) - len(run_epoch(kept, order, start))
    found: list[int] = total[case.filling :].tolist()
    return found


def rows(case: Case, repetitions: int) -> Iterator[dict[str, Any]]:
    """One measured, and one modelled."""
    accesses = case.ranks * -(-case.count // case.ranks)

    found: list[Measured] = [isolated(measure, case, timeout_s=600.0) for _ in range(repetitions)]
    prepare_s = float(np.mean([each.prepare_s for each in found]))

    def least_s(reads: list[int]) -> float:
        preparing_s = case.count / case.ranks * prepare_s / WORKERS
        return max(float(np.mean(reads)) * NBYTES / case.rate, preparing_s)

    row = _row(case, case.policy)
    if case.on_disk:  # as many copies as were asked for
        row["cache_share"] = float(np.mean([each.kept_share for each in found]))
        case = replace(case, share=row["cache_share"])
    expected = expected_reads(case, case.policy)
    row["least_s"] = least_s(expected)
    row |= report.summarise("hit_rate", [1 - float(np.mean(each.reads)) / accesses for each in found])
    hits = accesses - float(np.mean(expected))
    row["of_hits"] = (accesses - float(np.mean([each.reads for each in found]))) / hits
    seconds = [float(np.mean(each.seconds)) for each in found]
    yield row | report.summarise("epoch", seconds, "_s")
    lru = expected_reads(case, "lru")
    yield _row(case, "lru") | {"hit_rate": 1 - float(np.mean(lru)) / accesses, "least_s": least_s(lru)}


def _row(case: Case, policy: str) -> dict[str, Any]:
    said = f"measured, {case.name}, {case.count} objects"
    return {"case": said, "shards": case.shards, "cache_share": case.share, "policy": policy}


def cases(count: int, rate: float, *, quick: bool) -> Iterator[Case]:
    """Of sets with so many objects."""
    filling, epochs = (1, 1) if quick else (1, 3)
    for share in SHARES[1:2] if quick else SHARES:
        yield Case("one rank", 1, True, count, share, rate, PREPARE_S, filling, epochs)
        if not quick:
            yield Case("4 ranks, one directory", 4, True, count, share, rate, 2 * PREPARE_S, filling, epochs)
            yield Case("4 hosts", 4, False, count, share, rate, 2 * PREPARE_S, 4, epochs)


def epoch_rows(*, quick: bool, repetitions: int) -> Iterator[dict[str, Any]]:
    """At two sizes."""
    for count in (64,) if quick else (800, 1600):
        for case in cases(count, RATE * (10 if quick else 1), quick=quick):
            report.progress(f"{case.name}, {case.count} objects, cache {case.share:g}")
            yield from rows(case, repetitions)
