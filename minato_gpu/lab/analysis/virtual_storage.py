"""Storage under a virtual clock, read by what reads in production.

What is read when, how many reads are under way, what is asked for twice, what stays in memory, and when the loader
hears of what has come: all of that are the objects of the reader process (``sources/service.py``, ``pool.py``,
``remote.py``, ``memory_tier.py``, ``process.py``), in an event loop of asyncio whose time jumps to the next timer.
Only the storage is made up: each request waits for its latency, then its bytes for their turn at the storage's rate,
all requests together; the event loop of the reader process has some work with each.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from random import Random
from selectors import SelectSelector
from typing import Any

from minato_gpu.caching.choice import Choice, choose, look_ahead
from minato_gpu.caching.future import Integers
from minato_gpu.caching.orders import Orders
from minato_gpu.engine.builder import READ_AHEAD
from minato_gpu.lab.analysis.profile import Storage
from minato_gpu.lab.simulation.intake import Arrival
from minato_gpu.sources.blocks import Blocks, space_of
from minato_gpu.sources.files import Ended
from minato_gpu.sources.memory_tier import Begun, MemoryTier
from minato_gpu.sources.pool import ReaderPool
from minato_gpu.sources.process import Notifier, ReaderSettings
from minato_gpu.sources.remote import RemoteReads
from minato_gpu.sources.service import Ready, Service
from minato_gpu.sources.source import Key, Source

_NEVER = float("inf")


@dataclass(frozen=True)
class SimulatedStorage:
    """A storage like the one that was ``measured``. Of local files fewer are read at once than of URLs."""

    measured: Storage
    nbytes: Integers  # of each sample
    parts: int = 1  # requests of a sample; each reads its share (``measured.shares``, else equal ones)
    request_s: float = 0.0  # of the reader process, for each request
    byte_s: float = 0.0  # of the reader process, for each byte
    there: frozenset[int] = frozenset()  # samples in the page cache

    def part_bytes(self, sample: int, part: int) -> int:
        """Returns the bytes of a request."""
        shares = self.measured.shares
        share = shares[part] if len(shares) == self.parts else 1 / self.parts
        return max(1, int(int(self.nbytes[sample]) * share))

    def wait_s(self, rng: Random) -> float:
        """Draws a request's latency."""
        told = self.measured
        return told.latency_s * math.exp(rng.gauss(0.0, told.spread)) if told.latency_s else 0.0


@dataclass(frozen=True)
class Tier:
    """A cache in memory: a ``share`` of the set's bytes. ``policy``: "minio", "next-use" or "lru"; empty: as the
    loader chooses."""

    share: float
    policy: str = ""

    def budget(self, storage: SimulatedStorage) -> int:
        """Bytes of memory."""
        samples, parts = range(len(storage.nbytes)), range(storage.parts)
        each = sum(space_of(storage.part_bytes(sample, part)) for sample in samples for part in parts)
        return round(self.share * each)

    @property
    def decide(self) -> Callable[..., Choice]:
        """The policy's choice, as ``MemoryTier`` asks for it."""
        return partial(_told, self.policy) if self.policy else choose


def _told(policy: str, *, shards: float, share: float, **_: object) -> Choice:
    ahead = look_ahead(shards, share) if policy == "next-use" else 0
    return Choice(policy, ahead, f"{policy}: as it was told")


class _NoBytes(Blocks):
    """Blocks of nothing."""

    def __init__(self) -> None:
        self._numbers = count()

    def allocate(self, nbytes: int) -> tuple[int, memoryview]:
        return next(self._numbers), memoryview(bytearray())

    def publish(self, block: int) -> int:
        return 1

    def free(self, block: int) -> None:
        pass


class SharedBandwidth:
    """The rate of a storage, in bytes a second: one answer comes after the other, whoever has asked."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def transfer_s(self, now: float, nbytes: int) -> float:
        """Returns the seconds until so many bytes have arrived, after all that were asked for before."""
        self._free_at = max(self._free_at, now) + nbytes / self._bytes_per_s
        return self._free_at - now


def order_of(orders: Orders, epoch: int) -> Integers:
    """The keys of an epoch; here they are known."""
    order = orders.order(epoch)
    assert order is not None
    return order


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop that never waits: its time jumps to the next timer. ``next_at``: when that goes off, as of the
    last time that it ran; infinite where there is none."""

    def __init__(self) -> None:
        self.now = self.next_at = 0.0
        self._until = 0.0
        super().__init__(_Jumps(self._jump))

    def time(self) -> float:
        """Seconds since the beginning."""
        return self.now

    def run_until(self, until: float) -> None:
        """Lets it become that time, or as late as it is when a callback calls ``stop``."""
        self._until = until
        self.run_forever()

    def _jump(self, seconds: float | None) -> None:
        """Advances the clock, as nothing is to be done for so long (None: for ever)."""
        if seconds == 0:
            return
        self.next_at = _NEVER if seconds is None else self.now + seconds
        if seconds is None or self.next_at > self._until:
            self.stop()
        else:
            self.now = self.next_at


class _Jumps(SelectSelector):
    """Tells how long the event loop would wait."""

    def __init__(self, jump: Callable[[float | None], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[Any]:
        self._jump(timeout)
        return []


class _Answer(bytes):
    """Bytes of an answer, of which only the number counts."""

    nbytes = 0

    def __len__(self) -> int:
        return self.nbytes


class _Requests(RemoteReads):
    """Requests to the storage, each of which reads one part of a sample. ``count``: of those so far, but for what was
    asked for a second time."""

    def __init__(self, storage: SimulatedStorage, link: SharedBandwidth, seed: int) -> None:
        super().__init__()
        self.count = 0
        self._under_way: set[str] = set()  # of those the paths
        self._storage, self._link, self._rng = storage, link, Random(seed)
        self._loop = asyncio.get_running_loop()
        self._free_at = 0.0  # when the event loop is through with what it has begun

    async def read(self, source: Source) -> bytes:
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self.ask(source, answer.set_result, answer.cancelled)
        return await answer

    def ask(self, source: Source, then: Callable[[bytes], None], given_up: Callable[[], bool]) -> None:
        """Calls ``then`` with the source's bytes, once they have come."""
        if source.path not in self._under_way:  # else this is the second time
            self._under_way.add(source.path)
            self.count += 1
        key, part = map(int, source.path.split("/")[-2:])
        answer = _Answer()
        answer.nbytes = self._storage.part_bytes(key, part)

        def end() -> None:
            self._under_way.discard(source.path)
            then(answer)

        self._go_on(self._seconds(answer.nbytes), end, given_up)

    def _go_on(self, seconds: Iterator[float], end: Callable[[], None], given_up: Callable[[], bool]) -> None:
        if given_up():
            return
        step = next(seconds, None)
        if step is None:
            end()
        else:
            self._loop.call_later(step, self._go_on, seconds, end, given_up)

    def _seconds(self, nbytes: int) -> Iterator[float]:
        """How long each step of a request takes, from when it is asked for."""
        storage = self._storage
        yield self._at_work(storage.request_s / 2) + storage.wait_s(self._rng)
        yield self._link.transfer_s(self._loop.time(), nbytes)
        yield self._at_work(storage.request_s / 2 + nbytes * storage.byte_s)

    def _at_work(self, seconds: float) -> float:
        """Adds work of the event loop, which asks for something or takes what has come, after all before.

        Returns in how many seconds it is through.
        """
        now = self._loop.time()
        self._free_at = max(self._free_at, now) + seconds
        return self._free_at - now


class _LocalRequests:
    """Reads of local files: like requests, but none is asked for twice. See FileReads."""

    def __init__(self, requests: _Requests, ended: Callable[[Ended], None]) -> None:
        self._requests, self._ended, self._loop = requests, ended, asyncio.get_running_loop()
        self._closed = False

    def submit(self, number: int, source: Source) -> None:
        """Reads this source next."""
        begin = self._loop.time()

        def end(answer: bytes) -> None:
            self._ended((number, self._loop.time() - begin, number, len(answer), None))

        self._requests.ask(source, end, lambda: self._closed)

    def close(self) -> None:
        """Ends what is under way."""
        self._closed = True


class VirtualStorage:
    """Reads the samples that ``orders`` name, epoch by epoch; see ``simulation.intake.Reading``.

    ``shards``: an epoch reads one sample in so many. ``link``: shared with others; else one of its own. To be closed.
    """

    def __init__(
        self,
        storage: SimulatedStorage,
        orders: Orders,
        batch: int,
        tier: Tier | None = None,
        *,
        shards: int = 1,
        seed: int = 0,
        link: SharedBandwidth | None = None,
    ) -> None:
        self.ahead = -(-READ_AHEAD // batch)
        self._begun: list[int] = []  # requests before each epoch
        self._storage, self._orders, self._shards = storage, orders, shards
        memory = None if tier is None else MemoryTier(tier.budget(storage), len(storage.nbytes), decide=tier.decide)
        blocks = _NoBytes()
        self._service = Service(blocks, ReaderSettings.ahead_bytes, self._tell, memory)
        self._time = VirtualTime()
        self._time.run_until_complete(self._open(blocks, link or SharedBandwidth(storage.measured.bytes_per_s), seed))
        self._telling = Notifier()
        self._timer: asyncio.TimerHandle | None = None
        self._told: list[int] = []
        self._order = order_of(orders, 0)
        self._at = 0

    async def _open(self, blocks: Blocks, link: SharedBandwidth, seed: int) -> None:
        self._requests = _Requests(self._storage, link, seed)
        service, files = self._service, partial(_LocalRequests, self._requests)
        self._pool = service.pool = ReaderPool(blocks, service.done, self._requests, service.behind, files=files)

    def close(self) -> None:
        """Ends what is under way."""
        self._time.run_until_complete(self._pool.close())
        self._time.close()

    @property
    def reads(self) -> list[int]:
        """Requests of each epoch that was begun."""
        return [after - before for before, after in pairwise([*self._begun, self._requests.count])]

    # --- what the loader says ----------------------------------------------------------------------------------

    def begin(self, now: float, epoch: int) -> None:
        self._time.now = now
        self._order, self._at = order_of(self._orders, epoch), 0
        self._begun.append(self._requests.count)
        self._service.begin(Begun(epoch, self._orders if self._shards > 1 else None, self._shards))
        self._look()

    def want(self, now: float, place: int, serials: range) -> None:
        self._time.now = now
        keys = self._order[self._at : self._at + len(serials)].tolist()
        self._at += len(serials)
        here, tickets = [], []
        for serial, key in zip(serials, keys, strict=True):
            if key in self._storage.there:
                here.append(serial)
            else:
                tickets.append((serial, key, self._keys(key)))
        self._service.want(serials.start, tickets)
        if here:
            self._time.call_soon(self._are_there, here)
        self._look()

    def _keys(self, key: int) -> tuple[Key, ...]:
        where = "sample:/" if self._storage.measured.remote else ""
        return tuple(Source(f"{where}/{key}/{part}").key for part in range(self._storage.parts))

    def release(self, now: float, serials: Iterable[int]) -> None:
        self._time.now = now
        self._service.release(serials)
        self._tell_in(self._telling.look(self._service.there))
        self._look()

    # --- time ----------------------------------------------------------------------------------------------------

    def next_at(self) -> float:
        return self._time.now if self._told else self._time.next_at

    def advance(self, until: float) -> Arrival | None:
        if not self._told and self._time.next_at <= until and self._time.next_at < _NEVER:
            self._time.run_until(until)
        told, self._told = self._told, []
        return Arrival(self._time.now, told) if told else None

    def _look(self) -> None:
        """Finds out when something happens next."""
        self._time.run_until(self._time.now)

    def _are_there(self, serials: list[int]) -> None:
        self._told += serials
        self._time.next_at = self._time.now  # at the earliest
        self._time.stop()

    def _tell(self, told: Ready) -> None:
        self._tell_in(self._telling.add(told, self._service.there))

    def _tell_in(self, delay: float | None) -> None:
        if delay is not None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._time.call_later(delay, self._take)

    def _take(self) -> None:
        self._timer = None
        self._are_there([serial for serial, _ in self._telling.take()])
