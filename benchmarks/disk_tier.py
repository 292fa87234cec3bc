"""What a copy on disk costs: a hit beside a bare ``preadv`` of the same bytes into the same buffer, in turns.

In one pass over all entries every other one is read barely, and those between are hits (finding it in the index,
reading it, comparing its checksum); the next pass swaps them, so that both read the same bytes of the same files.
``warm``: the page cache has them, but the processor's caches have seen all the others since. ``cold``: each is thrown
out before it is read, and ``cachestat`` must find nothing of it. The ratio is that of the medians of one repetition,
two passes; the tables have the median of all repetitions, and their spread.

Also what it costs to keep a copy, to give one up, and to open a directory that a process was killed in; and what
checksums of as many bytes would cost, which is why entries have the one they have.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from xxhash import xxh3_64_intdigest

from benchmarks import report
from benchmarks.page_cache import cached_pages, evict
from minato_gpu.sources.disk.records import Entry
from minato_gpu.sources.disk.tier import DiskTier

Row = dict[str, Any]
_VERSION = b"1"
_COLUMNS = ("what", "cache", "bytes", "bare_us", "hit_us", "ratio", "ratio_spread", "us", "us_spread", "cold_pages")
_CHECKSUMS: dict[str, Callable[[memoryview], object]] = {
    "xxh3 (64 bits)": xxh3_64_intdigest,
    "crc32": zlib.crc32,
    "blake2b": lambda data: hashlib.blake2b(data, digest_size=16).digest(),
}


def hit_rows(folder: Path, sizes: Sequence[int], entries: int, repetitions: int) -> list[Row]:
    """Rows of each size: keeping, a hit warm and cold, giving up."""
    return [row for size in sizes for row in _of_size(folder / f"of-{size}", size, entries, repetitions)]


def _of_size(path: Path, size: int, entries: int, repetitions: int) -> list[Row]:
    tier = DiskTier(path, entries * (size + 8192) * 2 + (64 << 20))
    keys = [number.to_bytes(16, "big") for number in range(entries)]
    content = np.random.default_rng(size).bytes(size)
    rows = [_timed("keep a copy", size, [partial(_kept, tier, key, content) for key in keys])]
    files = Files(path)
    rows += [_hits(files, tier, keys, size, cold, repetitions) for cold in (False, True)]
    files.close()
    rows.append(_timed("give a copy up", size, [partial(tier.remove, [key]) for key in keys]))
    tier.close()
    return rows


class Files:
    """The tier's files, opened by another way."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: dict[int, int] = {}

    def fd(self, number: int) -> int:
        """Of a segment; what is in it is on disk, so that it can be thrown out of the page cache."""
        if number not in self._open:
            self._open[number] = os.open(self._path / "segments" / f"{number:016x}.seg", os.O_RDWR)
            os.fdatasync(self._open[number])
        return self._open[number]

    def close(self) -> None:
        """Close them."""
        for fd in self._open.values():
            os.close(fd)


def checksum_rows(size: int, repetitions: int) -> list[Row]:
    """What each checksum takes."""
    data = memoryview(np.random.default_rng(0).bytes(size))
    return [
        _timed(f"checksum: {name}", size, [partial(function, data)] * (100 * repetitions))
        for name, function in _CHECKSUMS.items()
    ]


def opening_row(folder: Path, entries: int) -> Row:
    """How long it takes to open a directory that a process has died in, with its index read from end to end."""
    path = folder / "opening"
    child = os.fork()
    if child == 0:
        tier = DiskTier(path, entries * 8192 + (64 << 20))
        for number in range(entries):
            tier.write(number.to_bytes(16, "big"), _VERSION, memoryview(b"0"))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError("the process that was to fill the directory has failed")
    begin = time.perf_counter()
    tier = DiskTier(path, None)
    elapsed = time.perf_counter() - begin
    tier.close()
    return {"what": f"open after a death, {entries} entries", "us": elapsed * 1e6}


def _hits(files: Files, tier: DiskTier, keys: Sequence[bytes], size: int, cold: bool, repetitions: int) -> Row:
    into = memoryview(bytearray(size))
    entries = [_found(tier, key) for key in keys]
    bare, hits, left = [], [], 0
    for entry in entries:
        os.preadv(files.fd(entry.segment), [into], entry.offset)
    for _ in range(repetitions):
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(2 * len(entries)):
            entry, which = entries[number % len(entries)], (number + number // len(entries)) % 2
            fd = files.fd(entry.segment)
            if cold:
                evict(fd, entry.offset, -(-size // 4096) * 4096)
                left += cached_pages(fd, entry.offset, size) or 0
            begin = time.perf_counter()
            good = _hit(tier, entry.key, into) if which else os.preadv(fd, [into], entry.offset) == size
            times[which].append(time.perf_counter() - begin)
            if not good:
                raise RuntimeError(f"{entry.key!r} could not be read")
        bare.append(report.median(times[0]) * 1e6)
        hits.append(report.median(times[1]) * 1e6)
    ratios = [hit / read for hit, read in zip(hits, bare, strict=True)]
    row: Row = {"what": "hit", "cache": "cold" if cold else "warm", "bytes": size, "cold_pages": left if cold else None}
    for name, values, unit in (("bare", bare, "_us"), ("hit", hits, "_us"), ("ratio", ratios, "")):
        row |= report.summarise(name, values, unit)
    return row


def _found(tier: DiskTier, key: bytes) -> Entry:
    entry = tier.find(key, _VERSION)
    if entry is None:
        raise RuntimeError(f"{key!r} was not kept")
    return entry


def _hit(tier: DiskTier, key: bytes, into: memoryview) -> bool:
    entry = tier.find(key, _VERSION)
    return entry is not None and tier.read(entry, into)


def _kept(tier: DiskTier, key: bytes, content: bytes) -> None:
    if not tier.write(key, _VERSION, memoryview(content)):
        raise RuntimeError(f"{key!r} was not kept: {tier.stats()}")


def _timed(what: str, size: int, acts: Sequence[Callable[[], object]]) -> Row:
    times = []
    for act in acts:
        begin = time.perf_counter()
        act()
        times.append((time.perf_counter() - begin) * 1e6)
    return {"what": what, "bytes": size, "us": report.median(times), "us_spread": report.spread(times)}


def rows(folder: Path | None, quick: bool, repetitions: int) -> list[Row]:
    """All of them, measured in a new folder of ``folder``, which goes afterwards."""
    sizes, entries = ((100_000,), 20) if quick else ((10_000, 100_000, 1_000_000), 500)
    with tempfile.TemporaryDirectory(dir=folder, prefix="disk-tier-") as made:
        found = hit_rows(Path(made), sizes, entries, repetitions)
        found += checksum_rows(100_000, repetitions)
        found.append(opening_row(Path(made), 100 if quick else 100_000))
    return found


@click.command(help=__doc__)
@report.command
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="On the disk to be measured; without it, that of temporary files.",
)
def main(json_path: str | None, quick: bool, repetitions: int | None, folder: Path | None) -> None:
    repetitions = repetitions or (2 if quick else 7)
    found = rows(folder, quick, repetitions)
    settings = {"repetitions": repetitions, "quick": quick}
    report.publish(report.document("disk_tier", settings, found), json_path, _COLUMNS)


if __name__ == "__main__":
    main()
