"""What a hit costs: bytes that a cache has kept, beside a bare read of as many.

``memory``: as a worker has them, by ``read_bytes`` of a source that lies at hand; beside a bare ``preadv`` of shared
memory into an array that is there already. ``disk``: as the reader process has them: the file's time and size, the
read of the copy's file into a new block, the checksum; beside a bare ``preadv`` of the same file, open, into a block
that is there already. ``warm``: the page cache has them (a hit leaves it as it is); ``cold``: each is thrown out before
it is read.

In one pass every other copy is read barely, in the next those between: the processor's caches have seen all the others
since.
"""

from __future__ import annotations

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
from minato_gpu.sources.disk_pool import tier_key, version_of
from minato_gpu.sources.reading import AT_HAND

Row = dict[str, Any]


def memory_row(nbytes: int, copies: int, repetitions: int) -> Row:
    """Hits of a worker."""
    arena = Arena("hits", 2 * copies * (nbytes + 8192) + (1 << 20))
    blocks, places = Blocks(arena), []
    for number in range(copies):
        block, view = blocks.allocate(nbytes)
        view[:] = np.random.default_rng(number).bytes(nbytes)
        places.append((block, nbytes, blocks.publish(block), f"/{number}", 0, None))
    into = np.empty(nbytes, np.uint8)
    AT_HAND.arena = arena

    def bare(at: int) -> None:
        os.preadv(arena.fd, [into.data], places[at][0] + HEAD)

    def hit(at: int) -> None:
        if len(read_bytes(Source(places[at][3]))) != nbytes:
            raise AssertionError(f"copy {at} has another length")

    row = _row(hit, bare, nbytes, copies, repetitions, lambda at: AT_HAND.put([places[at]]))
    if AT_HAND.direct:
        raise AssertionError("some were not at hand")
    AT_HAND.put(())
    AT_HAND.arena = None
    arena.close()
    return {"tier": "memory", "cache": None, **row}


def disk_rows(folder: Path, nbytes: int, copies: int, repetitions: int) -> Iterator[Row]:
    """Hits of the reader process: warm and cold."""
    tier = DiskTier(folder / "cache", 2 * copies * (nbytes + 8192) + (64 << 20))
    arena = Arena("hits", 1 << 26)
    blocks = Blocks(arena)
    _, into = blocks.allocate(nbytes)
    sources, keys, files = list[Source](), list[bytes](), list[int]()
    for number in range(copies):
        path = folder / f"{number}"
        path.write_bytes(np.random.default_rng(number).bytes(nbytes))
        sources.append(Source(str(path)))
        keys.append(tier_key((str(path), 0, None)))
        if not tier.write(keys[-1], version_of(sources[-1]), memoryview(path.read_bytes())):
            raise AssertionError(f"copy {number} was not kept")
        files.append(os.open(folder / "cache" / entry.path_of(keys[-1]), os.O_RDWR))
        os.fdatasync(files[-1])  # so that it can be thrown out of the page cache

    def bare(at: int) -> None:
        os.preadv(files[at], [into], entry.HEAD)

    def hit(at: int) -> None:
        taken = []

        def allocate(size: int) -> memoryview:
            block, view = blocks.allocate(size)
            taken.append(block)
            return view

        if tier.read(keys[at], version_of(sources[at]), allocate) != nbytes:
            raise AssertionError(f"{sources[at]} has no copy")
        blocks.free(taken[0])

    for at in range(copies):  # which brings them into the page cache
        bare(at)
    yield {"tier": "disk", "cache": "warm", **_row(hit, bare, nbytes, copies, repetitions, lambda at: None)}
    yield {"tier": "disk", "cache": "cold", **_row(hit, bare, nbytes, copies, repetitions, lambda at: evict(files[at]))}
    tier.close()
    for file in files:
        os.close(file)
    arena.close()


def _row(
    hit: Callable[[int], None],
    bare: Callable[[int], None],
    nbytes: int,
    copies: int,
    repetitions: int,
    before: Callable[[int], None],
) -> Row:
    """Microseconds of both; ``before`` is called, untimed, before each."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * repetitions * copies):
        at, barely = number % copies, (number + number // copies) % 2
        before(at)
        begin = perf_counter()
        (bare if barely else hit)(at)
        times[barely].append(1e6 * (perf_counter() - begin))
    row: Row = {"bytes": nbytes, "ratio": report.median(times[0]) / report.median(times[1])}
    return row | report.summarise("hit", times[0], "_us") | report.summarise("bare", times[1], "_us")


@report.benchmark("hits", 7)
@report.folder_option
def main(quick: bool, repetitions: int, folder: Path | None) -> Iterator[Row]:
    sizes, copies = ((100_000,), 20) if quick else ((10_000, 100_000, 1_000_000), 300)
    for size in sizes:
        yield memory_row(size, copies, repetitions)
        with tempfile.TemporaryDirectory(dir=folder, prefix="hits-") as made:
            yield from disk_rows(Path(made), size, copies, repetitions)


if __name__ == "__main__":
    main()
