"""The reader pool on a virtual clock, before storage whose latency the test chooses."""

from __future__ import annotations

import asyncio
import errno
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from minato_gpu.memory.arena import Arena
from minato_gpu.sources.blocks import Blocks
from minato_gpu.sources.pool import ReaderPool
from minato_gpu.sources.remote import ATTEMPTS, RemoteReads, is_final
from minato_gpu.sources.source import Source
from tests.sources.loops import on_a_virtual_clock

SIZE = 64


class Refused(Exception):
    """As aiohttp's error of a response."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Storage(RemoteReads):
    """Answers after ``latency(now, number of the request)`` seconds; at most ``rate`` answers a second."""

    def __init__(self, latency: Callable[[float, int], float], rate: float | None = None) -> None:
        self.latency, self.rate = latency, rate
        self.requests = self.most = self.under_way = self.cancelled = 0
        self.errors: list[Exception | None] = []  # of the first requests
        self._free_at = 0.0

    async def read(self, source: Source) -> bytes:
        loop = asyncio.get_running_loop()
        number, self.requests = self.requests, self.requests + 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await asyncio.sleep(self.latency(loop.time(), number))
            if self.rate is not None:
                self._free_at = max(self._free_at, loop.time()) + 1 / self.rate
                await asyncio.sleep(self._free_at - loop.time())
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.under_way -= 1
        if number < len(self.errors) and (error := self.errors[number]) is not None:
            raise error
        return source.path.encode().ljust(SIZE)

    async def close(self) -> None:
        pass


class Consumer:
    """Wants ``window`` sources ahead, and uses one every ``1 / rate`` seconds, in their order."""

    def __init__(self, storage: Storage, rate: float, window: int) -> None:
        self.arena = Arena("test")
        self.blocks = Blocks(self.arena)
        self.pool = ReaderPool(self.blocks, self._done, storage, behind=self._behind)
        self.rate, self.window = rate, window
        self.used = self.wanted = 0
        self.errors: dict[int, BaseException] = {}
        self._there: dict[int, int] = {}
        self._came = asyncio.Event()

    def _behind(self) -> bool:
        return 2 * len(self._there) < self.wanted - self.used

    def _done(self, number: int, block: int, nbytes: int, error: BaseException | None) -> None:
        if error is None:
            assert bytes(self.arena.buffer[block + 8 : block + 8 + nbytes]) == f"s3://{number}".encode().ljust(SIZE)
        else:
            self.errors[number] = error
        self._there[number] = block
        self._came.set()

    async def use(self, until: float) -> int:
        """Use sources until then; returns how many."""
        loop, before = asyncio.get_running_loop(), self.used
        due = loop.time()
        while loop.time() < until:
            while self.wanted < self.used + self.window:
                self.pool.submit(self.wanted, Source(f"s3://{self.wanted}"))
                self.wanted += 1
            while self.used not in self._there:
                self._came.clear()
                await self._came.wait()
            block = self._there.pop(self.used)
            if block >= 0:
                self.blocks.free(block)
            self.used += 1
            due = max(due + 1 / self.rate, loop.time())
            await asyncio.sleep(due - loop.time())
        return self.used - before

    async def all_there(self) -> None:
        """Until all that was wanted has come."""
        while len(self._there) < self.wanted:
            self._came.clear()
            await self._came.wait()

    async def close(self) -> None:
        await self.pool.close()
        self.arena.close()


def tailed(median_s: float, seed: int) -> Callable[[float, int], float]:
    """One in a hundred takes ten times as long."""
    rng = random.Random(seed)
    return lambda now, number: median_s * math.exp(rng.gauss(0, 0.1)) * (10 if rng.random() < 0.01 else 1)


@pytest.mark.parametrize(("latency_ms", "rate"), [(20, 667), (100, 100), (100, 667)])
@on_a_virtual_clock
async def test_latency_and_its_tail_are_hidden(latency_ms: int, rate: int) -> None:
    storage = Storage(tailed(latency_ms / 1e3, 1))
    consumer, now = Consumer(storage, rate, 1024), asyncio.get_running_loop().time()
    await consumer.use(now + 2)
    used = await consumer.use(now + 6)
    assert consumer.pool.stats()["hedges"] <= 0.06 * storage.requests + 16
    await consumer.close()
    assert used / 4 / rate >= 0.97


@pytest.mark.parametrize("factor", [0.1, 10.0])
@on_a_virtual_clock
async def test_a_latency_that_changes_tenfold_is_met_within_three_seconds(factor: float) -> None:
    change, median = asyncio.get_running_loop().time() + 5, 0.05 if factor > 1 else 0.2
    consumer = Consumer(Storage(lambda now, number: median * (factor if now > change else 1.0)), 500, 1024)
    await consumer.use(change + 3)
    used = await consumer.use(change + 8)
    await consumer.close()
    assert used / 5 / 500 >= 0.9


@on_a_virtual_clock
async def test_a_storage_that_gives_no_more_is_not_asked_for_more() -> None:
    storage = Storage(lambda now, number: 0.05, rate=200)
    consumer, now = Consumer(storage, 1000, 1024), asyncio.get_running_loop().time()
    await consumer.use(now + 5)
    used = await consumer.use(now + 15)
    await consumer.close()
    assert storage.most <= 256 + 16, "with second requests"
    assert used / 10 / 200 >= 0.97


@pytest.mark.parametrize(
    ("errors", "requests", "fails"),
    [
        ([ConnectionError("lost")], 2, False),
        ([Refused(500), Refused(503)], 3, False),
        ([Refused(404)], 1, True),
        ([EOFError("too short")], 1, True),
        ([PermissionError("expired")], 1, True),
        ([Refused(401)], 1, True),
        ([ConnectionError("lost")] * 9, ATTEMPTS, True),
    ],
    ids=lambda value: str(value)[:40],
)
@on_a_virtual_clock
async def test_what_fails_is_tried_again_where_that_may_help(
    errors: list[Exception], requests: int, fails: bool
) -> None:
    storage = Storage(lambda now, number: 0.01)
    storage.errors = list(errors)
    consumer = Consumer(storage, 100, 1)
    consumer.pool.submit(0, Source("s3://0"))
    consumer.wanted = 1
    await consumer._came.wait()
    await consumer.close()
    assert storage.requests == requests
    assert list(consumer.errors.values()) == ([errors[min(requests, len(errors)) - 1]] if fails else [])


@on_a_virtual_clock
async def test_a_request_that_is_never_answered_is_named() -> None:
    consumer = Consumer(Storage(lambda now, number: 1e6), 100, 1)
    begin = asyncio.get_running_loop().time()
    consumer.pool.submit(0, Source("s3://0"))
    await consumer._came.wait()
    seconds = asyncio.get_running_loop().time() - begin
    await consumer.close()
    assert seconds == pytest.approx(60 * ATTEMPTS, rel=0.2), "with the pauses in between"
    assert "s3://0 has not been answered in 60 seconds" in str(consumer.errors[0])


@on_a_virtual_clock
async def test_the_request_that_is_not_needed_any_more_is_cancelled() -> None:
    """The first that takes long is asked a second time: what is late then costs nothing more."""
    loop = asyncio.get_running_loop()
    storage = Storage(lambda now, number: 1e6 if number == 100 else 0.05)
    consumer = Consumer(storage, 100, 1)
    begin = loop.time()
    while consumer.used < 102:
        await consumer.use(loop.time() + 1e-3)
    stats, seconds = consumer.pool.stats(), loop.time() - begin
    assert storage.under_way == 0
    await consumer.close()
    assert (stats["hedges"], stats["hedges_won"], storage.cancelled, storage.requests) == (1, 1, 1, 103)
    assert seconds < 10


@on_a_virtual_clock
async def test_what_may_not_be_asked_again_at_once_is_not_forgotten() -> None:
    """Many are never answered, among them second requests, more than may be asked again at a time: none is waited for
    until it has timed out."""
    loop = asyncio.get_running_loop()
    storage = Storage(lambda now, number: 1e6 if 40 <= number < 52 or number % 50 == 49 else 0.05)
    consumer, begin = Consumer(storage, 1000, 256), loop.time()
    while consumer.used < 2000:
        await consumer.use(loop.time() + 1e-3)
    assert loop.time() - begin < 30
    await consumer.close()


@on_a_virtual_clock
async def test_what_is_under_way_or_pauses_ends_with_the_pool() -> None:
    storage = Storage(lambda now, number: 0.0 if number == 0 else 100.0)
    storage.errors = [ConnectionError("lost")]
    consumer = Consumer(storage, 100, 2)
    consumer.pool.submit(0, Source("s3://0"))
    await asyncio.sleep(0.01)
    assert consumer.pool.stats()["retries"] == 1
    consumer.pool.submit(1, Source("s3://1"))
    await asyncio.sleep(0.001)
    await consumer.close()
    await asyncio.sleep(1000.0)
    assert not consumer._there, "nobody is told"
    assert (storage.requests, storage.under_way) == (2, 0)


@on_a_virtual_clock
async def test_a_read_that_has_not_begun_may_be_hastened() -> None:
    storage, done = Storage(lambda now, number: 1.0 + number / 1e3), list[int]()
    arena = Arena("test")
    pool = ReaderPool(Blocks(arena), lambda number, *_: done.append(number), storage)
    for number in range(10, 210):
        pool.submit(number, Source(f"s3://{number}"))
    assert not pool.hasten(10, 0, Source("s3://10")) and pool.hasten(209, 1, Source("s3://209"))
    while len(done) < 200:
        await asyncio.sleep(0.1)
    await pool.close()
    arena.close()
    assert sorted(done) == [1, *range(10, 209)]
    assert done.index(1) == 64, "after those that had begun"


@on_a_virtual_clock
async def test_where_much_is_there_already_little_is_asked_for_at_once() -> None:
    """Several ranks may share a storage: what one sends for later is answered before what another needs next."""
    storage = Storage(lambda now, number: 0.005)
    consumer = Consumer(storage, 100, 1)
    consumer.pool = ReaderPool(consumer.blocks, consumer._done, storage, behind=lambda: False)
    consumer.wanted = 200
    for number in range(consumer.wanted):
        consumer.pool.submit(number, Source(f"s3://{number}"))
    await consumer.all_there()
    await consumer.close()
    assert storage.most == 8


# --- which requests are sent again -----------------------------------------------------------------------------


def _with(error: BaseException, **attributes: Any) -> BaseException:
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


def _from(cause: BaseException) -> BaseException:
    error = OSError("translated")
    error.__cause__ = cause
    return error


_BOTO = {"Error": {"Code": "SlowDown"}, "ResponseMetadata": {"HTTPStatusCode": 503}}


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (OSError(errno.EBUSY, "Please reduce your request rate."), False),
        (_with(Exception("aiohttp"), status=429), False),
        (_with(Exception("adlfs"), status_code=503), False),
        (_with(Exception("requests"), response=SimpleNamespace(status_code=503)), False),
        (_from(_with(Exception("botocore"), response=_BOTO)), False),
        (_with(Exception("gcsfs"), code="conflict"), False),
        (_with(Exception("adlfs"), status_code=404), True),
        (OSError(errno.EIO, "broken"), False),
        (PermissionError("expired"), True),
    ],
)
def test_what_storage_says_is_known_wherever_its_library_says_it(error: BaseException, final: bool) -> None:
    assert is_final(error) == final
