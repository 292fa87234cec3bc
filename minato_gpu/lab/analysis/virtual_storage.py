"""Storage under a virtual clock, read by what reads in production.

What is read when, how many reads are under way, what stays in memory, and when the loader hears of what has come: all
of that are the objects of the reader process (``sources/service.py``, ``pool.py``, ``memory_tier.py``, ``process.py``),
in an event loop of asyncio whose time jumps to the next timer. Only the storage is made up: each read waits for its
latency, then its bytes for their turn at the storage's rate, all reads together; the event loop of the reader process
has some work with each.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from random import Random
from selectors import SelectSelector
from typing import Any

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
from minato_gpu.sources.service import Ready, Service
from minato_gpu.sources.source import Key, Source

_NEVER = float("inf")
_READ_S = 5e-5  # of the reader process, for each read; and for each byte, measured on a machine half as fast:
_BYTE_S = 5e-10
_SPREAD = 0.1  # sigma of the latencies' logarithm


@dataclass(frozen=True)
class SimulatedStorage:
    """A storage like the one that was ``measured``."""

    measured: Storage
    nbytes: Integers  # of each sample
    parts: int = 1  # reads of a sample, of equal bytes
    there: frozenset[int] = frozenset()  # samples in the page cache

    def part_bytes(self, sample: int) -> int:
        """Returns the bytes of a read."""
        return max(1, int(self.nbytes[sample]) // self.parts)

    def wait_s(self, rng: Random) -> float:
        """Draws a read's latency."""
        latency_s = self.measured.latency_s
        return latency_s * math.exp(rng.gauss(0.0, _SPREAD)) if latency_s else 0.0

    def budget(self, share: float) -> int:
        """Bytes of memory that a share of the set takes."""
        return round(share * self.parts * sum(space_of(self.part_bytes(sample)) for sample in range(len(self.nbytes))))


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


class _Reads:
    """Reads of samples' parts, as ``FileReads`` has them. ``ended`` is called for each."""

    def __init__(self, storage: SimulatedStorage, seed: int, ended: Callable[[Ended], None]) -> None:
        self._storage, self._rng, self._ended = storage, Random(seed), ended
        self._loop = asyncio.get_running_loop()
        self._loop_free_at = 0.0  # when the event loop is through with what it has begun
        self._link_free_at = 0.0  # when all bytes that were asked for have come
        self._closed = False

    def submit(self, number: int, source: Source) -> None:
        """Reads this source next."""
        nbytes = self._storage.part_bytes(int(source.path.split("/")[1]))
        self._go_on(self._steps(nbytes), number, nbytes, self._loop.time())

    def close(self) -> None:
        """Ends what is under way."""
        self._closed = True

    def _go_on(self, seconds: Iterator[float], number: int, nbytes: int, begin: float) -> None:
        if self._closed:
            return
        step = next(seconds, None)
        if step is None:
            self._ended((number, self._loop.time() - begin, number, nbytes, None))
        else:
            self._loop.call_later(step, self._go_on, seconds, number, nbytes, begin)

    def _steps(self, nbytes: int) -> Iterator[float]:
        """Yields how long each step of a read takes, from when it is asked for."""
        yield self._at_work(_READ_S / 2) + self._storage.wait_s(self._rng)
        now = self._loop.time()
        self._link_free_at = max(self._link_free_at, now) + nbytes / self._storage.measured.bytes_per_s
        yield self._link_free_at - now
        yield self._at_work(_READ_S / 2 + nbytes * _BYTE_S)

    def _at_work(self, seconds: float) -> float:
        """Adds work of the event loop, which asks for something or takes what has come, after all before.

        Returns in how many seconds it is through.
        """
        now = self._loop.time()
        self._loop_free_at = max(self._loop_free_at, now) + seconds
        return self._loop_free_at - now


class VirtualStorage:
    """Reads the samples that ``orders`` name, epoch by epoch; see ``simulation.intake.Reading``.

    ``cache``: share of the set's bytes that memory may keep (None: none). ``shards``: an epoch reads one sample in so
    many. To be closed.
    """

    def __init__(
        self,
        storage: SimulatedStorage,
        orders: Orders,
        batch: int,
        cache: float | None = None,
        *,
        shards: int = 1,
        seed: int = 0,
    ) -> None:
        self.ahead = -(-READ_AHEAD // batch)
        self._storage, self._orders, self._shards = storage, orders, shards
        memory = None if cache is None else MemoryTier(storage.budget(cache), len(storage.nbytes))
        blocks = _NoBytes()
        self._service = Service(blocks, ReaderSettings.ahead_bytes, self._tell, memory)
        self._time = VirtualTime()
        self._time.run_until_complete(self._open(blocks, seed))
        self._telling = Notifier()
        self._timer: asyncio.TimerHandle | None = None
        self._told: list[int] = []
        self._order = order_of(orders, 0)
        self._at = 0

    async def _open(self, blocks: Blocks, seed: int) -> None:
        service, files = self._service, partial(_Reads, self._storage, seed)
        self._pool = service.pool = ReaderPool(blocks, service.done, behind=service.behind, files=files)

    def close(self) -> None:
        """Ends what is under way."""
        self._time.run_until_complete(self._pool.close())
        self._time.close()

    # --- what the loader says ----------------------------------------------------------------------------------

    def begin(self, now: float, epoch: int) -> None:
        self._time.now = now
        self._order, self._at = order_of(self._orders, epoch), 0
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
        return tuple(Source(f"/{key}/{part}").key for part in range(self._storage.parts))

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
