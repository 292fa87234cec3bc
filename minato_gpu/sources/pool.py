"""The reader pool: reads what it is given in that order, as many at once as pay, and does not wait for the slowest.

Files of this machine are read by threads (files.py), URLs by fsspec (remote.py). All of this runs in the event loop of
the reader process.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from statistics import quantiles
from typing import Any, Protocol

from minato_gpu.sources.blocks import Blocks
from minato_gpu.sources.files import Ended, FileReads
from minato_gpu.sources.remote import Answer, RemoteReads, UrlReads
from minato_gpu.sources.source import Source

_LATENCIES = 1024
_PAYS = 1.1
_STEP = 2
_HOLD_S, _LONGEST_HOLD_S = 1.0, 8.0
_SHORTEST_S = 0.05
_LATER = 2.0  # a latency that grows by this factor by itself: nothing that was learned is worth anything
_AT_LEISURE = 8  # as many keep a buffer of 256 at half through the slowest in a hundred, at 667/s and 100 ms
_OTHERWISE = 1.5  # where the storage only queues, latency grows as the limit does, and not by this much more
_SHORTEST_STRETCH_S, _LEAST_READS = 0.1, 8  # of a stretch
_STRETCHES = 32


class Pool(Protocol):
    """Reads sources by number."""

    def submit(self, number: int, source: Source) -> None:
        """Begins to read this source, or queues it behind those of lower numbers; never waits."""

    def cancel(self, number: int) -> None:
        """Notes that this read is not needed any more.

        It still ends, sooner or later: as cancelled, if it has not begun.
        """


class Reads(Pool, Protocol):
    """The reads of one loader: a ReaderPool, or a part in one that several loaders share."""

    done: Callable[..., None]  # called as each read has ended, as ``Service.done``
    rate: StorageRate  # of the storage, while the reader waits for it

    def stats(self) -> dict[str, Any]:
        """Returns counters and latencies."""

    def count_anew(self) -> None:
        """Sets the loader's own counters to zero."""

    async def close(self) -> None:
        """Ends the loader's own reads; those that are shared go on."""


class ReaderPool:
    """Reads files and URLs, many at once, in order of need."""

    def __init__(
        self,
        blocks: Blocks,
        done: Callable[..., None],
        remote: RemoteReads | None = None,
        behind: Callable[[], bool] = lambda: True,
        keeps: Callable[[int], bool] = lambda number: True,
    ) -> None:
        """``done`` is called for every source with its number, its block (NOWHERE after an error, IN_PAGE_CACHE where
        the kernel keeps the bytes), how many bytes there are, and the error or None.

        Files and URLs have limits of their own. ``behind`` returns whether little of what is wanted is there; else
        there is no reason to read many at once. ``keeps`` says, by the read's number, of which files a tier may keep
        the bytes (see FileReads). ``rate`` measures what the storage gives.
        """
        self._blocks, self.done = blocks, done
        self._loop = asyncio.get_running_loop()
        self._lanes = (_Lane(16, 64, behind), _Lane(64, 1024, behind))  # reads of files, and of URLs
        self._file_reads = FileReads(blocks, self._local_ended, keeps=keeps)
        self._urls = UrlReads(remote or RemoteReads(), self._remote_ended)
        self._queued: set[int] = set()  # not begun
        self._cancelled: set[int] = set()
        self._behind, self.rate = behind, StorageRate()

    def submit(self, number: int, source: Source) -> None:
        lane = self._lanes[source.is_remote]
        heapq.heappush(lane.queue, (number, source))
        self._queued.add(number)
        self._start(lane)

    def hasten(self, number: int, sooner: int, source: Source) -> bool:
        """Gives a read the lower number ``sooner``, by which it is reported; returns False if it has begun."""
        if number not in self._queued:
            return False
        self._queued.discard(number)
        self.submit(sooner, source)
        return True

    def cancel(self, number: int) -> None:
        self._cancelled.add(number)

    def _start(self, lane: _Lane) -> None:
        while lane.queue and lane.under_way < lane.concurrency.allowed(behind=self._behind()):
            number, source = heapq.heappop(lane.queue)
            if number not in self._queued:  # it has another by now
                continue
            self._queued.discard(number)
            lane.under_way += 1
            if number in self._cancelled:
                self._cancelled.discard(number)
                self._loop.call_soon(self._ended, lane, number, -1, 0, asyncio.CancelledError())
            elif lane is self._lanes[0]:
                self._file_reads.submit(number, source)
            else:
                self._urls.submit(number, source)

    def _ended(self, lane: _Lane, number: int, block: int, nbytes: int, error: BaseException | None) -> None:
        self._cancelled.discard(number)
        lane.under_way -= 1
        if error is None:
            self.rate.finished(self._loop.time(), nbytes, behind=self._behind())
        self._start(lane)
        self.done(number, block, nbytes, error)

    def _local_ended(self, ended: Ended) -> None:
        number, seconds, block, nbytes, error = ended
        lane = self._lanes[0]
        lane.finished(self._loop.time(), seconds)
        self._ended(lane, number, block, nbytes, error)

    def _remote_ended(self, number: int, answer: Answer, seconds: float) -> None:
        lane, block, nbytes, error = self._lanes[1], -1, 0, None
        if isinstance(answer, BaseException):
            error = answer
        else:
            lane.finished(self._loop.time(), seconds)
            try:
                block, view = self._blocks.allocate(len(answer))
                view[:], nbytes = answer, len(answer)
            except MemoryError as full:
                error = full
        self._ended(lane, number, block, nbytes, error)

    # --- what is said of it ----------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Returns counters of URLs, and for files and URLs how many may be read at once and recent latencies in
        seconds; a kind of which no read has ended is left out."""
        kinds = {name: lane.stats() for name, lane in zip(("files", "urls"), self._lanes, strict=True) if lane.used}
        return {**self._urls.counts, **kinds}

    def count_anew(self) -> None:
        """Sets the counters to zero; how many are read at once, and latencies, stay."""
        self._urls.counts = dict.fromkeys(self._urls.counts, 0)

    async def close(self) -> None:
        """Cancels reads of URLs, which are not reported. Threads end after the reads of files that they have been
        given; they are not waited for."""
        self._file_reads.close()
        await self._urls.close()


class _Lane:
    """Reads of one kind: those that wait, by number, and how many are under way."""

    def __init__(self, start: int, most: int, behind: Callable[[], bool]) -> None:
        self._behind = behind
        self.queue: list[tuple[int, Source]] = []
        self.under_way = 0
        self.concurrency = Concurrency(start, most)
        self._latencies: deque[float] = deque(maxlen=_LATENCIES)

    @property
    def used(self) -> bool:
        """True once a latency has been measured: a file has been read, or a URL was answered."""
        return bool(self._latencies)

    def finished(self, now: float, seconds: float) -> None:
        """Notes that a read has ended after so many seconds."""
        full = bool(self.queue) and self.under_way >= self.concurrency.limit and self._behind()
        self.concurrency.finished(now, seconds, full=full)
        self._latencies.append(seconds)

    def stats(self) -> dict[str, float]:
        """Returns how many may be read at once, and recent latencies in seconds."""
        percent = quantiles(self._latencies, n=100) if len(self._latencies) > 1 else [*self._latencies] * 99
        return {
            "at_once": self.concurrency.limit,
            "latency_p50_s": percent[49],
            "latency_p90_s": percent[89],
            "latency_p99_s": percent[98],
        }


class Concurrency:
    """Decides how many reads are under way at once. The time is an argument. ``limit``: reads that may be under way:
    ``start`` at first, ``most`` at most.

    Little's law says how many must be for a rate and a latency: rate x latency. Neither is known before, and both
    change, so the limit is doubled while that pays: where too little is there, and reads wait although as many are
    under way as may be. A step that has not brought 10 % more is taken back, because then the storage is at its own
    limit and only queues. It is tried again later.

    Where much of what is wanted is there already, few reads are under way, in order of need. Several readers, such as
    the ranks of a training, may share a storage, and all that one sends for later is answered before what another one
    needs next: four ranks that each missed a fifth of an epoch took 1.6 times as long when each sent all of it at once.
    """

    def __init__(self, start: int = 16, most: int = 1024) -> None:
        self.limit = start
        self.latency_s = 0.0  # mean of the last interval
        self._most = most
        self._since: float | None = None
        self._count = 0
        self._seconds = 0.0
        self._full = True  # all through the interval too little was there, and reads have waited
        self._before: tuple[int, float, float] | None = None  # limit, rate and latency before the last step
        self._hold_until = 0.0
        self._hold_s = _HOLD_S

    def allowed(self, *, behind: bool) -> int:
        """Returns how many reads may be under way now; ``behind``: little of what is wanted is there."""
        return self.limit if behind else min(self.limit, _AT_LEISURE)

    def finished(self, now: float, latency_s: float, *, full: bool) -> None:
        """Notes that a read has ended; ``full``: more at once would help."""
        if self._since is None:
            self._since = now - latency_s
        self._count += 1
        self._seconds += latency_s
        self._full = self._full and full
        elapsed = now - self._since
        if elapsed >= _SHORTEST_S and self._count >= min(self.limit, 64) and elapsed >= self._seconds / self._count:
            self._evaluate(now, self._count / elapsed, self._seconds / self._count)
            self._since, self._count, self._seconds, self._full = now, 0, 0.0, True

    def _evaluate(self, now: float, rate: float, latency_s: float) -> None:
        slower, first = latency_s > _LATER * self.latency_s > 0.0, self.latency_s == 0.0
        self.latency_s = latency_s
        if first:  # in which connections were made, and nothing came for as long as the first answer took
            return
        if not self._full:
            self._before, self._hold_until = None, 0.0  # it gives what is wanted
            return
        if self._before is not None:
            limit, rate_before, latency_before = self._before
            self._before = None
            queues = latency_s < _OTHERWISE * latency_before * self.limit / limit  # else the storage has become slower
            if rate < _PAYS * rate_before and queues:
                self.limit, self._hold_until = limit, now + self._hold_s
                self._hold_s = min(2 * self._hold_s, _LONGEST_HOLD_S)
                return
            self._hold_until, self._hold_s = 0.0, _HOLD_S
        if slower:
            self._hold_until, self._hold_s = 0.0, _HOLD_S
        if now >= self._hold_until and self.limit < self._most:
            self._before = self.limit, rate, latency_s
            self.limit = min(self._most, _STEP * self.limit)


class StorageRate:
    """Measures what the storage gives, in bytes a second, while the reader asks for all that it can give.

    Where nothing is waited for, requests come seldom, and what they bring tells of the loader, not of the storage. So
    only stretches count in which too little was there, and of these the upper quartile: the first ones may be slow,
    while the number of reads at once grows.
    """

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_STRETCHES)
        self._since: float | None = None
        self._reads = self._nbytes = 0

    def finished(self, now: float, nbytes: int, *, behind: bool) -> None:
        """Notes that a read of so many bytes has ended; ``behind``: too little is there."""
        if not behind:
            self._since = None
            return
        if self._since is None:
            self._since, self._reads, self._nbytes = now, 0, 0
            return
        self._reads += 1
        self._nbytes += nbytes
        if now - self._since >= _SHORTEST_STRETCH_S and self._reads >= _LEAST_READS:
            self._rates.append(self._nbytes / (now - self._since))
            self._since, self._reads, self._nbytes = now, 0, 0

    @property
    def bytes_per_s(self) -> float:
        """The rate; 0.0 if the storage never was what one waited for."""
        return sorted(self._rates)[3 * len(self._rates) // 4] if self._rates else 0.0
