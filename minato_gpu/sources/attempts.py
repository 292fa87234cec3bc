"""Reads of URLs: as many attempts as it takes, and in each one request, or two where the first takes long.

A request is a task, and the only one: what it is answered is dealt with as it ends, and who waits too long is found by
two timers for all (overdue.py). When to ask twice or again is hedging.py's to decide.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from minato_gpu.sources.concurrency import Concurrency
from minato_gpu.sources.hedging import ATTEMPTS, Hedging, is_expired, is_final, is_refusal, pause_s
from minato_gpu.sources.overdue import SLACK_S, Overdue
from minato_gpu.sources.remote import RemoteReads
from minato_gpu.sources.source import Source

_TIME_OUT_S = 60.0  # an attempt that is not answered by then has failed


Answer = bytes | BaseException
Ended = Callable[[int, Answer, float, float], None]
"""Number, the bytes or why there are none, and seconds: of the attempt that was answered, and of all."""


@dataclass(slots=True, eq=False)
class _Read:
    """One source: the attempt that runs (``begin``, ``requests``), and what those before it have come to."""

    number: int
    source: Source
    begin: float
    attempt_begin: float
    failures: int = 0
    renewed: bool = False
    # that are not answered; whether it was asked a second time
    requests: dict[asyncio.Task[None], bool] = field(default_factory=dict)
    pause: asyncio.TimerHandle | None = None  # until the next attempt


class Attempts:
    """``ended`` is told of every read; ``concurrency`` tells whether the storage gives no more (hedging.py).
    ``counts``: see ``ReaderPool.stats``."""

    def __init__(self, remote: RemoteReads, concurrency: Concurrency, ended: Ended) -> None:
        self._remote, self._concurrency, self._ended = remote, concurrency, ended
        self._loop = asyncio.get_running_loop()
        self._hedging = Hedging()
        self._reads: dict[int, _Read] = {}
        self._slow = Overdue[_Read](lambda: self._hedging.patience_s, self._takes_long)
        self._dead = Overdue[_Read](lambda: _TIME_OUT_S, self._time_out)
        self.counts = dict.fromkeys(("hedges", "hedges_won", "retries", "refused"), 0)

    def submit(self, number: int, source: Source) -> None:
        """Read this now."""
        now = self._loop.time()
        read = self._reads[number] = _Read(number, source, now, now)
        self._begin(read)

    def _begin(self, read: _Read) -> None:
        """Begin the next attempt."""
        read.pause = None
        now = read.attempt_begin = self._loop.time()
        self._slow.add(read, now)
        self._dead.add(read, now)
        self._request(read, is_second=False)

    def _request(self, read: _Read, *, is_second: bool) -> None:
        read.requests[self._loop.create_task(self._run(read))] = is_second

    async def _run(self, read: _Read) -> None:
        answer: Answer
        try:
            answer = await self._remote.read(read.source)
        except (Exception, asyncio.CancelledError) as error:
            answer = error
        is_second = read.requests.pop(cast("asyncio.Task[None]", asyncio.current_task()), None)
        if is_second is None:  # the other one was answered first, or it took too long
            return
        if isinstance(answer, bytes):
            if is_second or read.requests:
                self.counts["hedges_won"] += is_second
                self._hedging.hedged(won=is_second)
            self._answered(read, answer)
        elif not read.requests:
            self._answered(read, answer)

    def _answered(self, read: _Read, answer: Answer) -> None:
        """The attempt has ended."""
        for request in read.requests:
            request.cancel()
        read.requests = {}
        self._slow.remove(read)
        self._dead.remove(read)
        now = self._loop.time()
        seconds = now - read.attempt_begin
        patient = self._hedging.patience_s is not None
        self._hedging.finished(read.number, seconds)
        if not patient and self._hedging.patience_s is not None:
            self._slow.look()
        if isinstance(answer, bytes) or not self._tries_again(read, answer):
            del self._reads[read.number]
            self._ended(read.number, answer, seconds, now - read.begin)
        self._ask_again()

    def _tries_again(self, read: _Read, error: BaseException) -> bool:
        """Whether there will be one more attempt."""
        read.failures += 1
        if is_refusal(error):
            self.counts["refused"] += 1
            self._hedging.refused(self._loop.time())
        expired = is_expired(error) and not read.renewed
        if read.failures == ATTEMPTS or (is_final(error) and not expired):
            return False
        if expired:
            read.renewed = True
            self._remote.renew(read.source)
        self.counts["retries"] += 1
        read.pause = self._loop.call_later(pause_s(read.failures), self._begin, read)
        return True

    # --- what takes long -------------------------------------------------------------------------------------

    def _takes_long(self, read: _Read) -> None:
        self._hedging.overdue(read.number, read.attempt_begin)
        self._ask_again()

    def _ask_again(self) -> None:
        """For those that take long, as far as that is allowed now."""
        now = self._loop.time() + SLACK_S
        while (number := self._hedging.next(now, at_its_limit=self._concurrency.at_its_limit)) is not None:
            self.counts["hedges"] += 1
            self._request(self._reads[number], is_second=True)

    def _time_out(self, read: _Read) -> None:
        self._answered(read, TimeoutError(f"{read.source} has not been answered in {_TIME_OUT_S:g} seconds"))

    async def close(self) -> None:
        """End what is under way: nobody is told."""
        self._slow.close()
        self._dead.close()
        requests = [request for read in self._reads.values() for request in read.requests]
        for read in self._reads.values():
            read.requests = {}
            if read.pause is not None:
                read.pause.cancel()
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        await self._remote.close()
