"""Phases that need no step of the script: they run while it waits for a batch, or after it has ended.

Preparation by itself, with different numbers of workers; and storage by itself, by reads of files that the page cache
does not have, one at a time, then more at once. One read at a time takes latency + bytes / rate; many at once give the
rate. So the two are told apart: max(bytes / rate, requests x latency / concurrency).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count as numbered
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

from minato_gpu.lab.analysis import files
from minato_gpu.lab.analysis.findings import Findings
from minato_gpu.lab.analysis.phases import TimeBox
from minato_gpu.lab.analysis.profile import mean
from minato_gpu.lab.analysis.subject import Subject
from minato_gpu.samples import Key, Value

LEVELS = (1, 2, 4, 8, 16)
_NO_LONGER = 1.25  # times
_STILL_CACHED = 0.05  # of the bytes: more, and the reads would tell of memory


class Read(NamedTuple):
    """A piece of a file."""

    path: str
    offset: int
    nbytes: int


class Level(NamedTuple):
    """What reads with so many under way at once gave."""

    at_once: int  # reads under way
    seconds: float  # mean of a read
    nbytes: float  # mean of a read
    bytes_per_s: float  # of all


def pieces(paths: Sequence[str], nbytes: int) -> list[Read]:
    """Returns the files cut into reads of that size, neighbours far apart, so that no read has the kernel read the
    next."""
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
    """Runs these reads at each level, each level its own share of them and of the seconds.

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
    numbers = numbered()

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


def rate_and_latency(levels: Sequence[Level]) -> tuple[float, float]:
    """Bytes a second, and seconds until a read's first byte, from at least one level.

    Where many reads at once each take no longer than one by itself, the rate's limit has not been reached: there is at
    least as much, and what a read takes is latency.
    """
    first, last = min(levels), max(levels)
    rate = max(level.bytes_per_s for level in levels)
    if last.at_once > first.at_once and last.seconds < _NO_LONGER * first.seconds:
        return rate, first.seconds
    return rate, max(0.0, first.seconds - first.nbytes / rate)


_MOST = 2000  # batches
_LEAST = 3
_SHARE_FOR_READING = 0.05  # of the whole time
_LARGEST_READ = 8 << 20
_TIMES = 2.0  # what a read takes by itself
_SOME_S = 5e-4
_WORKERS = (1, 8)  # that wait for storage: more than cores, to see how many reads it serves at once


class Standalone:
    """Preparation by itself, with different numbers of workers, and storage by itself."""

    def __init__(self, subject: Subject, findings: Findings, box: TimeBox, clock: Callable[[], float]) -> None:
        self._subject, self._findings, self._box, self._clock = subject, findings, box, clock

    def run(self) -> None:
        """Runs all of these phases, as far as time allows."""
        if self._findings.batches_seen == 0:
            return
        self.warmed(1.0)
        self._scale()
        self._probe()

    def warmed(self, enough: float) -> None:
        """Reads the samples' files in, where less than ``enough`` of them is in memory."""
        paths = self._findings.files
        share = files.cached_share(paths)
        if share is not None and share < enough:
            until = self._clock() + _SHARE_FOR_READING * self._box.seconds
            files.read_in(paths, lambda: self._clock() < until)
            share = files.cached_share(paths)
            if share is not None and share < min(enough, 0.95):
                self._findings.note(f"Only {share:.0%} of the samples' files stay in memory: warm was not quite warm.")

    def _scale(self) -> None:
        """Measures the rate with all workers, with one, and with half of them."""
        subject = self._subject
        counts = [subject.workers]
        if not subject.is_stream:  # a stream is shared out to its workers: another one
            counts += [1, subject.workers // 2]
        counts = [count for count in dict.fromkeys(counts) if 0 < count <= subject.workers]
        seconds = self._box.seconds_for("scaling", self._clock())
        for count in counts:
            if rate := self._rate(count, seconds / len(counts)):
                self._findings.scaling.append((count, rate))

    def _rate(self, workers: int, seconds: float) -> float:
        """Samples a second of batches taken at once for so long, with all bytes in memory; 0: too few came."""
        batches = self._batches()
        loader = self._subject.like(workers=workers, batches=batches or None)
        source: Iterator[Value] = iter(loader)
        times = []
        until = self._clock() + seconds
        for _ in source:
            times.append(self._clock())
            if len(times) >= _LEAST + workers and times[-1] >= until:
                break
        del source
        first = min(workers, max(len(times) - 2, 0))  # each worker's first batches come together
        last = len(times) - 1
        if last <= first:
            return 0.0
        if last - first > workers:
            last -= (last - first) % workers  # batches come in bursts of so many
        samples = sum(map(len, batches[first + 1 : last + 1])) if batches else (last - first) * self._subject.batch_size
        return samples / max(times[last] - times[first], 1e-9)

    def _batches(self) -> list[list[Key]]:
        """Returns the batches that were seen, whose files are in memory, again and again."""
        seen = self._subject.keys[: self._findings.batches_seen]
        full = [batch for batch in seen if len(batch) == self._subject.batch_size] or seen
        return list(islice(cycle(full), _MOST)) if full else []

    def _probe(self) -> None:
        """Storage by itself, if the files can be dropped."""
        found = self._findings
        if not found.files or not found.nbytes or not found.meters["cold"].steps:
            return
        seconds = self._box.seconds_for("storage", self._clock())
        nbytes = min(math.ceil(found.nbytes / max(found.requests, 1.0)), _LARGEST_READ)
        levels = probe(pieces(found.files, nbytes), seconds, self._clock)
        waits = found.seconds_of("cold") - found.seconds_of("warm")
        alone = levels[0].seconds * (found.requests or 1.0) if levels else 0.0
        if not self._subject.is_stream and waits > max(_TIMES * alone, _SOME_S):
            # the data set waits for more than its files: what it reads them through is the storage
            levels = [level for count in _WORKERS if (level := self._through_data_set(count)) is not None]
        if levels:
            found.levels.append(rate_and_latency(levels))
        else:
            found.note("Too few files were seen, or they could not be dropped, to measure storage by itself.")

    def _through_data_set(self, workers: int) -> Level | None:
        """Measures how long workers wait for cold samples, beyond what these cost warm."""
        found = self._findings
        files.drop(found.files)
        seen = self._subject.keys[: found.batches_seen]
        seconds = self._box.seconds_for("storage", self._clock())
        book, begin = f"through{workers}", self._clock()
        for number, _ in enumerate(self._subject.like(book, workers=workers, batches=seen)):
            if number >= workers and self._clock() - begin > seconds / 2:
                break
        samples, _ = self._subject.book(book).read()
        if len(samples) < 2:
            return None
        requests, nbytes = found.requests or 1.0, found.nbytes
        each = mean(sample.seconds for sample in samples) - found.seconds_of("warm")
        took = max(sample.at for sample in samples) - min(sample.at - sample.seconds for sample in samples)
        rate = nbytes * len(samples) / max(took, 1e-9)
        return Level(workers, max(each, 0.0) / requests, nbytes / requests, rate)
