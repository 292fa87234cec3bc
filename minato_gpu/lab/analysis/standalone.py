"""Phases that need no step of the script: they run while it waits for a batch, or after it has ended.

Preparation by itself, with different numbers of workers; and storage, through the data set, whose files the page cache
does not have: by how much longer a worker takes for a sample then, alone and beside others. A read alone takes latency
+ bytes / rate; many at once give the rate. So the two are told apart: max(bytes / rate, requests x latency /
concurrency).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import NamedTuple

from minato_gpu.lab.analysis import files
from minato_gpu.lab.analysis.findings import Findings
from minato_gpu.lab.analysis.phases import TimeBox
from minato_gpu.lab.analysis.profile import mean
from minato_gpu.samples import Key, Value

_NO_LONGER = 1.25  # times
_ROUNDING = 1e-6


class Level(NamedTuple):
    """Measured reads of storage, so many of them under way at once."""

    at_once: int  # reads under way
    seconds: float  # mean of a read
    nbytes: float  # mean of a read
    bytes_per_s: float  # of all


def rate_and_latency(levels: Sequence[Level]) -> tuple[float, float]:
    """Returns bytes a second, and seconds until a read's first byte, from at least one level.

    Where many reads at once each take no longer than one by itself, or storage was idle at times, the rate's limit has
    not been reached: there is at least what all of them have at once, and what a read takes is latency.
    """
    first, last = min(levels), max(levels)
    under_way = last.bytes_per_s * last.seconds / last.nbytes  # on average (Little's law)
    alike = last.at_once > first.at_once and last.seconds <= _NO_LONGER * first.seconds
    if alike or under_way < 1 - _ROUNDING:
        return last.at_once * last.nbytes / max(last.seconds, _SHORTEST_S), first.seconds
    rate = max(level.bytes_per_s for level in levels)
    return rate, max(0.0, first.seconds - first.nbytes / rate)


_MOST = 2000  # batches
_LEAST = 3
_SHARE_FOR_READING = 0.05  # of the whole time
_SHORTEST_S = 1e-6  # of a read: less is not measured
_WORKERS = (1, 8)  # that wait for storage: more than cores, to see how many reads it serves at once


class Standalone:
    """Preparation by itself, with different numbers of workers, and storage by itself."""

    def __init__(self, findings: Findings, box: TimeBox, clock: Callable[[], float]) -> None:
        self._subject, self._findings, self._box, self._clock = findings.subject, findings, box, clock

    def run(self) -> None:
        """Runs all of these phases, as far as time allows; none if no batch was seen."""
        if self._findings.batches_seen == 0:
            return
        self.warmed(1.0)
        self._scale()
        self._probe()

    def warmed(self, enough: float) -> None:
        """Reads the samples' files in, if a share below ``enough`` of their bytes is in memory."""
        paths = self._findings.files
        share = files.cached_share(paths)
        if share is not None and share < enough:
            until = self._clock() + _SHARE_FOR_READING * self._box.seconds
            files.read_in(paths, lambda: self._clock() < until)
            share = files.cached_share(paths)
            if share is not None and share < min(enough, 0.95):
                self._findings.note(f"Only {share:.0%} of the samples' files stay in memory: warm was not quite warm.")

    def _scale(self) -> None:
        """Measures the rate with all workers, with one, and with half of them; of a stream with all alone."""
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
        """Measures storage, if the files are known and can be dropped from the page cache."""
        found = self._findings
        if not found.files or not found.nbytes or not found.meters["cold"].steps:
            return
        # a stream is shared out to its workers: another one
        counts = (max(1, self._subject.workers),) if self._subject.is_stream else _WORKERS
        if levels := [level for count in counts if (level := self._read_by(count)) is not None]:
            found.rate_and_latency = rate_and_latency(levels)
        else:
            found.note("Too few samples were seen, or their files could not be dropped, to measure storage.")

    def _read_by(self, workers: int) -> Level | None:
        """Measures how long so many workers wait for cold samples, beyond what these cost warm; None: too few came."""
        found = self._findings
        files.drop(found.files)
        seen = self._subject.keys[: found.batches_seen]
        seconds = self._box.seconds_for("storage", self._clock())
        book, begin = f"through{workers}", self._clock()
        for number, _ in enumerate(islice(self._subject.like(book, workers=workers, batches=seen), found.batches_seen)):
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
