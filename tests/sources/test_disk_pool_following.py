"""A tier on disk that follows the orders of epochs to come: copies go as they are used, and room is made by that."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cache_replay import Items, replay_on_disk
from minato_gpu.caching.orders import Part
from minato_gpu.sampling.look_ahead import DistributedOrders
from minato_gpu.sources.disk import freeing
from minato_gpu.sources.disk.tier import DiskTier
from minato_gpu.sources.disk_pool import name_of
from minato_gpu.sources.memory_tier import Begun
from minato_gpu.sources.source import Key, Source
from tests.sources.disk.content import Elsewhere, disk_bytes
from tests.sources.test_disk_pool import Bench, FakeTier, on_bench

SAMPLES, RANKS, NBYTES = 800, 4, 20_000
BUDGET = 5 << 20
ORDERS = DistributedOrders(SAMPLES, True, False, 0, 0, RANKS, 0, 1)
NOBODY = 2**22 + 1  # no process has this id
PATH = "https://somewhere/{}"  # no files are needed


def key(sample: int) -> Key:
    return PATH.format(sample), 0, None


def begun(epoch: int, *, known: bool = True) -> Begun:
    return Begun(epoch, ORDERS if known else None, RANKS)


class Reads(Bench):
    """A bench whose sources are read at once; it does what the service does, one sample after the other."""

    def submit(self, number: int, source: Source) -> None:
        block, _ = self.blocks.allocate(NBYTES)
        asyncio.get_running_loop().call_soon(self.done, number, block, NBYTES, None, 0.5)

    async def read(self, sample: int, epoch: int) -> bool:  # type: ignore[override]
        """Whether it was a hit."""
        self.pool.following.wanted(sample, [key(sample)])
        self.pool.submit(0, Source(PATH.format(sample)))
        found = await self.told.get()
        hit, stays = "on_disk" in found, self.pool.following.stays(sample, epoch)
        if hit and not stays:
            self.pool.let_go(key(sample))
        elif not hit and stays:
            await self.write(Source(PATH.format(sample)), found)
        self.blocks.free(found["block"])
        return hit

    async def epoch(self, number: int, *, known: bool = True) -> int:
        """Hits of an epoch; what is to go has gone after it."""
        self.pool.begin(begun(number, known=known))
        hits = sum([await self.read(sample, number) for sample in ORDERS.order(number).tolist()])
        await asyncio.wrap_future(self.pool._writer.submit(self.pool._make_go))
        return hits

    def count(self, name: str) -> Any:
        return self.pool.counts()[name]


def reading(path: Path, act: Callable[[Reads], Coroutine[Any, Any, None]], pid: int | None = None) -> None:
    """Do it with a tier of a run of this process, unless another is told."""

    async def main() -> None:
        reads = Reads(DiskTier(path, BUDGET, run=("mine", pid or os.getpid())), SAMPLES)
        await act(reads)
        reads.close()

    asyncio.run(main())


def run_of(path: Path, name: str, part: Part | None, pid: int | None = None) -> None:
    """A run has begun an epoch; it lives as long as its process."""
    tier = DiskTier(path, BUDGET, run=(name, pid or os.getpid()))
    tier.begin_epoch(part)
    tier.close()


def expected(path: Path, epochs: int) -> list[int]:
    """Hits of each epoch, simulated."""
    tier = DiskTier(path / "empty", BUDGET)
    share = tier.room()[0] / (5 * 4096) / SAMPLES
    tier.close()
    return [len(hit) for hit in replay_on_disk(ORDERS, Items.equal(SAMPLES), share, epochs, RANKS)]


def test_hits_are_the_simulated_ones_and_the_budget_holds(tmp_path: Path) -> None:
    path, hits = tmp_path / "cache", []

    async def act(reads: Reads) -> None:
        for epoch in range(16):
            hits.append(await reads.epoch(epoch))
            assert disk_bytes(path) <= reads.count("nbytes") <= BUDGET
        assert reads.count("why").startswith("next-use")
        assert reads.count("removed") > 0 and reads.count("evicted") == reads.count("gone") == 0

    reading(path, act)
    simulated = expected(tmp_path, 16)
    each = SAMPLES // RANKS
    assert sum(hits[8:]) / 8 / each == pytest.approx(sum(simulated[8:]) / 8 / each, abs=0.03)
    assert sum(hits[8:]) / 8 / each > 1.5 * BUDGET / SAMPLES / (5 * 4096), "and not what came first"


def test_what_goes_is_what_is_not_wanted_soon(tmp_path: Path) -> None:
    async def act(reads: Reads) -> None:
        for epoch in range(4):
            await reads.epoch(epoch)
        before = {entry.key for entry in reads.tier.entries()}
        await reads.epoch(4)
        after = {entry.key for entry in reads.tier.entries()}
        used = {name_of(key(sample)): sample for sample in ORDERS.order(4).tolist()}
        late = {name for name, sample in used.items() if not reads.pool.following.stays(sample, 4)}
        assert before - after == before & late != set()
        assert before & used.keys() - late and after - before

    reading(tmp_path / "cache", act)


def test_in_the_first_epoch_of_a_run_nothing_goes(tmp_path: Path) -> None:
    """Other ranks may be about to begin."""

    async def before(reads: Reads) -> None:
        await reads.epoch(3)

    async def act(reads: Reads) -> None:
        assert await reads.epoch(4) > 20
        assert reads.count("why").startswith("next-use")
        assert reads.count("removed") == 0
        await reads.epoch(5)
        assert reads.count("removed") > 0

    reading(tmp_path / "cache", before, NOBODY)
    reading(tmp_path / "cache", act)


def test_from_the_moment_that_another_run_is_there_nothing_goes(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    other = Elsewhere(lambda: run_of(path, "other", None, os.getppid()))

    async def act(reads: Reads) -> None:
        for epoch in range(4):
            await reads.epoch(epoch)
        removed = reads.count("removed")
        assert removed > 0
        assert reads.count("why").startswith("next-use")
        reads.pool.begin(begun(4))
        assert other.succeeds()
        for sample in ORDERS.order(4).tolist():
            await reads.read(sample, 4)
        await reads.epoch(5)
        assert reads.count("removed") == removed
        assert reads.count("why") == "minio: another run uses the directory"

    reading(path, act)


def test_of_ranks_on_one_directory_the_copies_that_another_wants_soon_stay(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    second = DistributedOrders(SAMPLES, True, False, 0, 1, RANKS, 0, 1)
    run_of(path, "second", second.part(1))

    async def act(reads: Reads) -> None:
        for epoch in range(2):
            await reads.epoch(epoch)
        before = {entry.key for entry in reads.tier.entries()}
        removed = reads.count("removed")
        await reads.epoch(2)
        gone = before - {entry.key for entry in reads.tier.entries()}
        assert "ranks 0, 1 read again" in reads.count("why")
        assert reads.count("removed") > removed
        soon = [sample for orders in (ORDERS, second) for sample in orders.order(3).tolist()[:180]]
        assert gone and not gone & {name_of(key(sample)) for sample in soon}
        assert gone & {name_of(key(sample)) for sample in ORDERS.order(2).tolist()} == gone

    reading(path, act)


def test_orders_that_are_not_known_leave_all_as_it_was(tmp_path: Path) -> None:
    async def act(reads: Reads) -> None:
        for epoch in range(4):
            await reads.epoch(epoch, known=False)
        assert reads.count("removed") == 0 < reads.count("hits")
        assert reads.count("why").startswith("minio: the order of epochs to come is not known")

    reading(tmp_path / "cache", act)


def test_on_a_disk_without_holes_it_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is removed would take its room until all of its segment is."""
    monkeypatch.setattr(freeing, "punch_hole", lambda *_: False)

    async def act(reads: Reads) -> None:
        for epoch in range(6):
            await reads.epoch(epoch)
        assert 0 < reads.count("removed") <= 3
        assert reads.count("why") == "minio: this disk does not take back the space of single copies"

    reading(tmp_path / "cache", act)


def removable(tier: FakeTier, bench: Bench) -> None:
    """There are copies of five samples, and they may go."""
    bench.following.may = lambda beside: True
    tier.copies.update({name_of(key(sample)): (b"", b"copy") for sample in range(5)})


def test_what_goes_goes_before_what_comes_is_written(tmp_path: Path) -> None:
    """So that there is room for it; and many go together."""
    tier = FakeTier()

    async def act(bench: Bench) -> None:
        removable(tier, bench)
        tier.has_room = False
        bench.pool.submit(9, Source(PATH.format(9)))
        found = await bench.read(9, b"new")
        tier.may_write.clear()
        ended: asyncio.Queue[int] = asyncio.Queue()
        for number in range(2):
            assert bench.begin_write(Source(PATH.format(9)), found, partial(ended.put_nowait, number))
            for sample in range(5 * number):
                bench.pool.let_go(key(sample))
        tier.may_write.set()
        assert [await ended.get(), await ended.get()] == [0, 1]
        assert tier.batches == [5]
        assert tier.copies.keys() == {name_of(key(9))}

    on_bench(tier, act)


def test_what_is_to_go_goes_before_the_end(tmp_path: Path) -> None:
    tier = FakeTier()

    async def act(bench: Bench) -> None:
        removable(tier, bench)
        for sample in range(5):
            bench.pool.let_go(key(sample))

    on_bench(tier, act)
    assert not tier.copies
