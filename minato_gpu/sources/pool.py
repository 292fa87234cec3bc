"""The reader pool: reads what it is told in that order, as many at once as pay, and does not wait for the slowest.

How many are under way is concurrency.py's decision, when to ask twice or again hedging.py's; files of this machine are
read by local.py, URLs by remote.py. All of this runs in the event loop of the reader process.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterable
from statistics import quantiles
from typing import Any, Protocol

from minato_gpu.sources.blocks import Blocks
from minato_gpu.sources.concurrency import Concurrency
from minato_gpu.sources.hedging import Hedging, Retries, is_expired, is_final, is_refusal
from minato_gpu.sources.local import Ended, LocalReads
from minato_gpu.sources.placing import Cached, Where
from minato_gpu.sources.remote import RemoteReads
from minato_gpu.sources.source import Source

_TIME_OUT_S = 60.0


class Remote(Protocol):
    """Where URLs are read."""

    async def read(self, source: Source) -> bytes:
        """The source's bytes."""

    def renew(self, source: Source) -> None:
        """Begin with a new session."""

    async def close(self) -> None:
        """The end."""


class ReaderPool:
    """``done`` is told of every source: its number, the block that holds it and its bytes, or the error, and seconds.

    Local files and URLs have limits of their own. ``time_out_s``: after which a request is taken to have failed.
    ``behind``: whether little of what is wanted is there; else there is no reason to read more at once.
    ``where``, ``cached``: of files, see LocalReads.
    """

    def __init__(
        self,
        blocks: Blocks,
        done: Callable[[int, int, int, BaseException | None, float], None],
        remote: Remote | None = None,
        time_out_s: float = _TIME_OUT_S,
        behind: Callable[[], bool] = lambda: True,
        *,
        where: Callable[[int], Where] = lambda _: Where.BLOCK,
        cached: Cached | None = None,
    ) -> None:
        self._blocks, self._done = blocks, done
        self._loop = asyncio.get_running_loop()
        self._time_out_s = time_out_s
        self._local = LocalReads(blocks, self._local_ended, where=where, cached=cached)
        self._remote = remote or RemoteReads()
        self._lanes = (_Lane(16, 64, behind), _Lane(64, 1024, behind))  # of files, of URLs
        self._hedging, self._retries = Hedging(), Retries()
        self._knows_patience: asyncio.Future[None] = self._loop.create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._cancelled: set[int] = set()
        self._counts = dict.fromkeys(("hedges", "hedges_won", "retries", "refused"), 0)

    def submit(self, number: int, source: Source) -> None:
        """Read this, after those of lower numbers."""
        lane = self._lanes[source.is_remote]
        heapq.heappush(lane.queue, (number, source))
        self._start(lane)

    def cancel(self, numbers: Iterable[int]) -> None:
        """These are not needed any more: those that have not begun are ended as cancelled."""
        self._cancelled.update(numbers)

    def _start(self, lane: _Lane) -> None:
        while lane.queue and lane.under_way < lane.concurrency.limit:
            number, source = heapq.heappop(lane.queue)
            lane.under_way += 1
            if number in self._cancelled:
                self._cancelled.discard(number)
                self._loop.call_soon(self._ended, lane, number, -1, 0, asyncio.CancelledError(), 0.0)
            elif lane is self._lanes[0]:
                self._local.submit(number, source)
            else:
                task = self._loop.create_task(self._fetch(lane, number, source))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _ended(
        self, lane: _Lane, number: int, block: int, nbytes: int, error: BaseException | None, seconds: float
    ) -> None:
        self._cancelled.discard(number)
        lane.under_way -= 1
        self._start(lane)
        self._done(number, block, nbytes, error, seconds)

    def _local_ended(self, ended: Ended) -> None:
        number, seconds, block, nbytes, error = ended
        lane = self._lanes[0]
        lane.finished(self._loop.time(), seconds)
        self._ended(lane, number, block, nbytes, error, seconds)

    # --- URLs ------------------------------------------------------------------------------------------------

    async def _fetch(self, lane: _Lane, number: int, source: Source) -> None:
        begin = self._loop.time()
        try:
            data = await self._tried(lane, source)
            block, view = self._blocks.allocate(len(data))
            view[:] = data
        except Exception as error:
            self._ended(lane, number, -1, 0, error, 0.0)
        else:
            self._ended(lane, number, block, len(data), None, self._loop.time() - begin)

    async def _tried(self, lane: _Lane, source: Source) -> bytes:
        """Its bytes, after as many attempts as it takes."""
        renewed = False
        for failures in range(1, self._retries.attempts + 1):
            begin = self._loop.time()
            try:
                data = await self._asked(lane, source)
            except Exception as error:
                if is_refusal(error):
                    self._counts["refused"] += 1
                    self._hedging.refused(self._loop.time())
                expired = is_expired(error) and not renewed
                if failures == self._retries.attempts or (is_final(error) and not expired):
                    raise
                if expired:
                    renewed = True
                    self._remote.renew(source)
            else:
                lane.finished(self._loop.time(), self._loop.time() - begin)
                return data
            self._counts["retries"] += 1
            await asyncio.sleep(self._retries.pause_s(failures))
        raise AssertionError

    async def _asked(self, lane: _Lane, source: Source) -> bytes:
        """Its bytes, by one request, or by two where the first takes long: the one that is answered first counts."""
        begin = self._loop.time()
        first = self._loop.create_task(self._timed(source))
        requests = {first}
        try:
            if self._hedging.patience_s is None:
                either: set[asyncio.Future[Any]] = {first, self._knows_patience}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                assert self._hedging.patience_s is not None
                await asyncio.wait(requests, timeout=max(0.0, begin + self._hedging.patience_s - self._loop.time()))
            hedges = not first.done() and not lane.concurrency.at_its_limit
            if hedges and self._hedging.allows(self._loop.time()):
                self._counts["hedges"] += 1
                requests.add(self._loop.create_task(self._timed(source)))
            answered = await self._first_of(requests)
            self._hedging.finished(self._loop.time() - begin)
            if self._hedging.patience_s is not None and not self._knows_patience.done():
                self._knows_patience.set_result(None)
            self._counts["hedges_won"] += answered is not first
            return answered.result()
        finally:
            for request in requests:
                if not request.done():
                    request.cancel()

    @staticmethod
    async def _first_of(requests: set[asyncio.Task[bytes]]) -> asyncio.Task[bytes]:
        """The first that has an answer, or failed where none has."""
        left = requests
        while True:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                if not left or each.exception() is None:
                    return each

    async def _timed(self, source: Source) -> bytes:
        try:
            async with asyncio.timeout(self._time_out_s):
                return await self._remote.read(source)
        except TimeoutError as error:
            raise TimeoutError(f"{source} has not been answered in {self._time_out_s:g} seconds") from error

    # --- what is said of it ----------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters, and for files and URLs how many are read at once, and recent latencies in seconds."""
        kinds = {name: lane.stats() for name, lane in zip(("files", "urls"), self._lanes, strict=True) if lane.used}
        return {**self._counts, **kinds}

    async def close(self) -> None:
        """End what is under way."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._local.close()
        await self._remote.close()


class _Lane:
    """Reads of one kind: those that wait, by number, and how many are under way."""

    def __init__(self, start: int, most: int, behind: Callable[[], bool]) -> None:
        self._behind = behind
        self.queue: list[tuple[int, Source]] = []
        self.under_way = 0
        self.concurrency = Concurrency(start, most)
        self._latencies: list[float] = []
        self._next = 0

    @property
    def used(self) -> bool:
        """Whether there has been any."""
        return bool(self._latencies)

    def finished(self, now: float, seconds: float) -> None:
        """A read has ended, after so long."""
        full = bool(self.queue) and self.under_way >= self.concurrency.limit and self._behind()
        self.concurrency.finished(now, seconds, full=full)
        if len(self._latencies) < _LATENCIES:
            self._latencies.append(seconds)
        else:
            self._latencies[self._next % _LATENCIES] = seconds
        self._next += 1

    def stats(self) -> dict[str, float]:
        """See ReaderPool.stats."""
        percent = quantiles(self._latencies, n=100) if len(self._latencies) > 1 else self._latencies * 99
        return {
            "at_once": self.concurrency.limit,
            "latency_p50_s": percent[49],
            "latency_p90_s": percent[89],
            "latency_p99_s": percent[98],
        }


_LATENCIES = 1024
