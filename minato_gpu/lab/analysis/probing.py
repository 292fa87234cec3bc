"""The storage by itself: reads of files that the page cache does not have, one at a time, then more at once.

One read at a time takes latency + bytes / rate; many at once give the rate. So the two are told apart:
max(bytes / rate, requests x latency / concurrency).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import NamedTuple

from minato_gpu.lab.analysis import files

LEVELS = (1, 2, 4, 8, 16)
_NO_LONGER = 1.25  # times
_STILL_CACHED = 0.05  # of the bytes: more, and the reads would tell of memory


class Read(NamedTuple):
    """A piece of a file."""

    path: str
    offset: int
    nbytes: int


class Level(NamedTuple):
    """``at_once`` reads under way: of each the mean seconds and bytes, and of all the bytes a second."""

    at_once: int
    seconds: float
    nbytes: float
    bytes_per_s: float


def pieces(paths: Sequence[str], nbytes: int) -> list[Read]:
    """The files cut into reads of that size, neighbours far apart, so that no read has the kernel read the next."""
    found: list[list[Read]] = []
    for path in paths:
        try:
            size = Path(path).stat().st_size
        except OSError:  # it has gone since
            continue
        found.append([Read(path, at, min(nbytes, size - at)) for at in range(0, size, max(nbytes, 1))])
    longest = max(map(len, found), default=0)
    rows = [[each[number] for each in found if number < len(each)] for number in range(longest)]
    order = [*rows[0::2], *rows[1::2]]
    return [read for row in order for read in row if read.nbytes]


def probe(reads: Sequence[Read], seconds: float, clock: Callable[[], float]) -> list[Level]:
    """Run these reads at each level, each level its own share of them and of the seconds.

    A level whose files could not be dropped from the page cache is left out.
    """
    levels = [at_once for at_once in LEVELS if len(reads) >= 4 * sum(LEVELS[: LEVELS.index(at_once) + 1])]
    whole = sum(levels)
    at, found = 0, []
    for at_once in levels:
        share = reads[at : at + len(reads) * at_once // whole]
        at += len(share)
        paths = list(dict.fromkeys(read.path for read in share))
        files.drop(paths)
        cached = files.cached_share(paths)
        if cached is None or cached <= _STILL_CACHED:
            found.append(_level(at_once, share, clock, clock() + seconds / len(levels)))
    return [level for level in found if level.nbytes]


def _level(at_once: int, reads: Sequence[Read], clock: Callable[[], float], until: float) -> Level:
    numbers = count()

    def work() -> list[tuple[float, int]]:
        done: list[tuple[float, int]] = []
        while (number := next(numbers)) < len(reads):
            begin = clock()
            if begin >= until and done:
                break
            nbytes = _read(reads[number])
            done.append((clock() - begin, nbytes))
        return done

    begin = clock()
    with ThreadPoolExecutor(at_once) as pool:
        done = [each for future in [pool.submit(work) for _ in range(at_once)] for each in future.result()]
    elapsed = max(clock() - begin, 1e-9)
    nbytes = sum(each for _, each in done)
    return Level(at_once, sum(each for each, _ in done) / len(done), nbytes / len(done), nbytes / elapsed)


def _read(read: Read) -> int:
    file = os.open(read.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # what was not asked for is another read's
        return len(os.pread(file, read.nbytes, read.offset))
    finally:
        os.close(file)


def told_apart(levels: Sequence[Level]) -> tuple[float, float]:
    """Bytes a second, and seconds until a read's first byte, from at least one level.

    Where many reads at once each take no longer than one by itself, the rate's limit has not been reached: there is at
    least as much, and what a read takes is latency.
    """
    first, last = min(levels), max(levels)
    rate = max(level.bytes_per_s for level in levels)
    if last.at_once > first.at_once and last.seconds < _NO_LONGER * first.seconds:
        return rate, first.seconds
    return rate, max(0.0, first.seconds - first.nbytes / rate)
