"""The reader pool: reads what it is told in that order, as many at once as pay, and does not wait for the slowest.

How many are under way is concurrency.py's decision; files of this machine are read by local.py, URLs by attempts.py.
All of this runs in the event loop of the reader process.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from functools import partial
from statistics import quantiles
from typing import Any, Protocol

from minato_gpu.sources.attempts import Answer, Attempts
from minato_gpu.sources.blocks import Blocks
from minato_gpu.sources.concurrency import Concurrency
from minato_gpu.sources.local import Ended, LocalReads
from minato_gpu.sources.placing import Placing
from minato_gpu.sources.rate import StorageRate
from minato_gpu.sources.remote import RemoteReads
from minato_gpu.sources.source import Source

_LATENCIES = 1024


class Pool(Protocol):
    """What reads."""

    def submit(self, number: int, source: Source) -> None:
        """Read this, after those of lower numbers."""

    def cancel(self, number: int) -> None:
        """This is not needed any more. It is done all the same, sooner or later: as cancelled, if it has not begun."""


class Files(Protocol):
    """What reads files of this machine: see LocalReads."""

    def submit(self, number: int, source: Source) -> None:
        """Read this next."""

    def close(self) -> None:
        """End what is under way."""


class ReaderPool:
    """``done`` is told of every source: its number, the block that holds it and its bytes, or the error, and how long
    it took in seconds.

    Local files and URLs have limits of their own. ``behind``: whether little of what is wanted is there; else there is
    no reason to read many at once. ``placing``: of files, see LocalReads, in whose place ``files`` may make another.
    ``rate``: what the storage gives.
    """

    def __init__(
        self,
        blocks: Blocks,
        done: Callable[..., None],
        remote: RemoteReads | None = None,
        behind: Callable[[], bool] = lambda: True,
        placing: Placing | None = None,
        files: Callable[[Callable[[Ended], None]], Files] | None = None,
    ) -> None:
        self._blocks, self.done = blocks, done
        self._loop = asyncio.get_running_loop()
        self._lanes = (_Lane(16, 64, behind), _Lane(64, 1024, behind))  # of files, of URLs
        self._local: Files = (files or partial(LocalReads, blocks, placing=placing))(self._local_ended)
        self._attempts = Attempts(remote or RemoteReads(), self._lanes[1].concurrency, self._remote_ended)
        self._cancelled: set[int] = set()
        self._behind, self.rate = behind, StorageRate()

    def submit(self, number: int, source: Source) -> None:
        lane = self._lanes[source.is_remote]
        heapq.heappush(lane.queue, (number, source))
        self._start(lane)

    def cancel(self, number: int) -> None:
        self._cancelled.add(number)

    def _start(self, lane: _Lane) -> None:
        while lane.queue and lane.under_way < lane.concurrency.allowed(behind=self._behind()):
            number, source = heapq.heappop(lane.queue)
            lane.under_way += 1
            if number in self._cancelled:
                self._cancelled.discard(number)
                self._loop.call_soon(self._ended, lane, number, -1, 0, asyncio.CancelledError(), 0.0)
            elif lane is self._lanes[0]:
                self._local.submit(number, source)
            else:
                self._attempts.submit(number, source)

    def _ended(
        self, lane: _Lane, number: int, block: int, nbytes: int, error: BaseException | None, seconds: float
    ) -> None:
        self._cancelled.discard(number)
        lane.under_way -= 1
        if error is None:
            self.rate.finished(self._loop.time(), nbytes, behind=self._behind())
        self._start(lane)
        self.done(number, block, nbytes, error, seconds)

    def _local_ended(self, ended: Ended) -> None:
        number, seconds, block, nbytes, error = ended
        lane = self._lanes[0]
        lane.finished(self._loop.time(), seconds)
        self._ended(lane, number, block, nbytes, error, seconds)

    def _remote_ended(self, number: int, answer: Answer, attempt_s: float, seconds: float) -> None:
        lane, block = self._lanes[1], -1
        if isinstance(answer, bytes):
            lane.finished(self._loop.time(), attempt_s)
            try:
                block, view = self._blocks.allocate(len(answer))
            except MemoryError as error:
                answer = error
            else:
                view[:] = answer
        if isinstance(answer, bytes):
            self._ended(lane, number, block, len(answer), None, seconds)
        else:
            self._ended(lane, number, -1, 0, answer, seconds)

    # --- what is said of it ----------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters, and for files and URLs how many are read at once, and recent latencies in seconds."""
        kinds = {name: lane.stats() for name, lane in zip(("files", "urls"), self._lanes, strict=True) if lane.used}
        return {**self._attempts.counts, **kinds}

    def count_anew(self) -> None:
        """Count from zero."""
        self._attempts.counts = dict.fromkeys(self._attempts.counts, 0)

    async def close(self) -> None:
        """End what is under way."""
        self._local.close()
        await self._attempts.close()


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
        """Whether there has been any."""
        return bool(self._latencies)

    def finished(self, now: float, seconds: float) -> None:
        """A read has ended, after so long."""
        full = bool(self.queue) and self.under_way >= self.concurrency.limit and self._behind()
        self.concurrency.finished(now, seconds, full=full)
        self._latencies.append(seconds)

    def stats(self) -> dict[str, float]:
        """See ReaderPool.stats."""
        percent = quantiles(self._latencies, n=100) if len(self._latencies) > 1 else [*self._latencies] * 99
        return {
            "at_once": self.concurrency.limit,
            "latency_p50_s": percent[49],
            "latency_p90_s": percent[89],
            "latency_p99_s": percent[98],
        }
