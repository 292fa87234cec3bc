"""What a hit costs: bytes that a tier has kept, as a worker has them from memory, and as the reader process has them
from disk.

``memory``: ``read_bytes`` of a source that lies at hand, beside a bare ``preadv`` of shared memory into an array that
is there already.

``disk``: a read by the reader pool that finds a copy on disk: the file's time and size, the read of the copy's file
into a new block, the checksum; beside a bare ``preadv`` of the same file, open, by such a thread, into a block that is
there already.
``warm``: the page cache has them (a hit leaves it as it is); ``cold``: each is thrown out before it is read. ``hit_us``
is what the pool's thread takes, ``turn_us`` until the event loop has been told.

In one pass every other copy is read barely, in the next those between: the processor's caches have seen all the others
since.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.isolate import evict
from minato_gpu import Source, read_bytes
from minato_gpu.memory.arena import Arena
from minato_gpu.sources.blocks import HEAD, Blocks
from minato_gpu.sources.disk import entry
from minato_gpu.sources.disk.tier import DiskTier
from minato_gpu.sources.disk_pool import DiskPool, name_of, version_of
from minato_gpu.sources.files import Ended, FileReads
from minato_gpu.sources.following import Following
from minato_gpu.sources.page_cache import Where
from minato_gpu.sources.reading import AT_HAND

Row = dict[str, Any]


def memory_row(nbytes: int, copies: int, repetitions: int) -> Row:
    """As a worker sees it."""
    arena = Arena("hits", 2 * copies * (nbytes + 8192) + (1 << 20))
    blocks, places = Blocks(arena), []
    for number in range(copies):
        block, view = blocks.allocate(nbytes)
        view[:] = np.random.default_rng(number).bytes(nbytes)
        places.append((block, nbytes, blocks.publish(block), f"/{number}", 0, None))
    sources = [Source(place[3]) for place in places]
    into, hits, bare = np.empty(nbytes, np.uint8), [], []
    AT_HAND.arena = arena
    for number in range(2 * repetitions * copies):
        source, place = sources[number % copies], places[number % copies]
        AT_HAND.put([place])
        begin = perf_counter()
        if (number + number // copies) % 2:
            os.preadv(arena.fd, [into.data], place[0] + HEAD)
            bare.append(perf_counter() - begin)
        else:
            found = read_bytes(source)
            hits.append(perf_counter() - begin)
            if not np.array_equal(found, np.frombuffer(blocks.view(place[0], nbytes), np.uint8)):
                raise AssertionError(f"{source} has other bytes")
    if AT_HAND.direct:
        raise AssertionError("some were not at hand")
    AT_HAND.put(())
    AT_HAND.arena = None
    arena.close()
    return {"tier": "memory", "cache": None, **_figures(hits, bare, nbytes)}


class _Nothing:
    """Reads nothing: all must be hits."""

    def __init__(self, done: Callable[..., None]) -> None:
        self.done = done

    def submit(self, number: int, source: Source) -> None:
        """It is a miss."""
        self.done(number, -1, 0, AssertionError(f"{source} has no copy"), 0.0)

    def cancel(self, number: int) -> None:
        """There is nothing to cancel."""


class _DiskHits:
    """Files of ``nbytes``, with copies on disk."""

    def __init__(self, folder: Path, nbytes: int, copies: int) -> None:
        self.nbytes = nbytes
        self.tier = DiskTier(folder / "cache", 2 * copies * (nbytes + 8192) + (64 << 20))
        self.arena = Arena("hits", 1 << 26)
        self.blocks = Blocks(self.arena)
        self.mine, self.into = self.blocks.allocate(nbytes)
        self.sources, self.files = [], list[int]()
        for number in range(copies):
            path = folder / f"{number}"
            path.write_bytes(np.random.default_rng(number).bytes(nbytes))
            self.sources.append(Source(str(path)))
            key, version = name_of((str(path), 0, None)), version_of(self.sources[-1])
            if not self.tier.write(key, version, _read(path)):
                raise AssertionError(f"copy {number} was not kept")
            self.files.append(os.open(folder / "cache" / entry.name_of(key), os.O_RDWR))
            os.fdatasync(self.files[-1])  # so that it can be thrown out of the page cache

    async def rows(self, repetitions: int) -> list[Row]:
        """Warm and cold."""
        told: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()

        def done(number: int, block: int, nbytes: int, error: BaseException | None, seconds: float, **_: Any) -> None:
            told.put_nowait((block, nbytes, error, seconds, perf_counter()))

        def ended(each: Ended) -> None:
            number, seconds, block, nbytes, error = each
            done(number, block, nbytes, error, seconds)

        pool = DiskPool(self.tier, self.blocks, _Nothing(done), Following(0))  # type: ignore[arg-type]
        bare = FileReads(self.blocks, ended, self._barely)
        rows = [await self._row(pool, bare, told, cold, repetitions) for cold in (False, True)]
        bare.close()
        pool.finish()
        self.tier.close()
        for file in self.files:
            os.close(file)
        self.arena.close()
        return rows

    def _barely(self, source: Source, _: Where = Where.BLOCK) -> tuple[int, int]:
        return self.mine, os.preadv(self.files[source.offset], [self.into], entry.HEAD)

    async def _row(
        self, pool: DiskPool, bare: FileReads, told: asyncio.Queue[tuple[Any, ...]], cold: bool, repetitions: int
    ) -> Row:
        hits, turns, barely = list[float](), list[float](), list[float]()
        for at in range(len(self.files)):  # which brings them into the page cache
            self._barely(Source("", at))
        for number in range(2 * repetitions * len(self.sources)):
            at, which = number % len(self.sources), (number + number // len(self.sources)) % 2
            if cold:
                evict(self.files[at])
            begin = perf_counter()
            if which:
                bare.submit(number, Source("", at))
            else:
                pool.submit(number, self.sources[at])
            block, nbytes, error, seconds, now = await told.get()
            if error is not None or nbytes != self.nbytes:
                raise AssertionError(f"no hit: {error!r}, {nbytes} bytes")
            (barely if which else hits).append(seconds)
            if not which:
                turns.append(now - begin)
                self.blocks.free(block)
        row = {"tier": "disk", "cache": "cold" if cold else "warm", **_figures(hits, barely, self.nbytes)}
        return row | {"turn_us": report.median(turns) * 1e6}


def _read(path: Path) -> memoryview:
    return memoryview(path.read_bytes())


def _figures(hits: list[float], bare: list[float], nbytes: int) -> Row:
    row: Row = {"bytes": nbytes, "ratio": report.median(hits) / report.median(bare)}
    for name, values in (("hit", hits), ("bare", bare)):
        row |= report.summarise(name, [value * 1e6 for value in values], "_us")
    return row


@report.benchmark("hits", 7)
@report.folder_option
def main(quick: bool, repetitions: int, folder: Path | None) -> Iterator[Row]:
    sizes, copies = ((100_000,), 20) if quick else ((10_000, 100_000, 1_000_000), 300)
    for size in sizes:
        yield memory_row(size, copies, repetitions)
        with tempfile.TemporaryDirectory(dir=folder, prefix="hits-") as made:
            yield from asyncio.run(_DiskHits(Path(made), size, copies).rows(repetitions))


if __name__ == "__main__":
    main()
