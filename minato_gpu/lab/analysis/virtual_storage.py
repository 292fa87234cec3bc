"""Storage under the virtual clock, read by the decisions of the reader process.

What is read when, how many reads are under way, what stays in memory, and when the loader is told of what has come:
all of that is the object that runs in production (``sources/service.py``, ``memory_tier.py``, ``concurrency.py``,
``hedging.py``, ``telling.py``). Only the storage is made up: each request waits for its latency, then its bytes for
their turn at the storage's rate, all requests together; the event loop of the reader process has some work with each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from random import Random

from minato_gpu.caching.choice import Choice, choose, look_ahead
from minato_gpu.caching.future import Integers
from minato_gpu.caching.orders import Orders
from minato_gpu.engine.building import READ_AHEAD
from minato_gpu.lab.analysis.profile import Storage
from minato_gpu.lab.simulation.reading import Arrival
from minato_gpu.sources.blocks import Blocks, space_of
from minato_gpu.sources.concurrency import Concurrency
from minato_gpu.sources.hedging import Hedging
from minato_gpu.sources.memory_tier import Begun, MemoryTier
from minato_gpu.sources.overdue import SLACK_S
from minato_gpu.sources.process import ReaderSettings
from minato_gpu.sources.service import Service, Told
from minato_gpu.sources.source import Key, Source
from minato_gpu.sources.telling import Telling

_NEVER = float("inf")


@dataclass(frozen=True)
class SimulatedStorage:
    """A storage like the one that was ``measured``: ``nbytes`` of each sample, shape (samples,), come in ``parts``
    requests, each of which reads its share of them (``measured.shares``; where there are fewer or more: all alike).

    ``request_s``, ``byte_s``: of the reader process for each request and each byte, one after the other. ``there``:
    samples that the page cache has. Of local files fewer are read at once than of URLs.
    """

    measured: Storage
    nbytes: Integers
    parts: int = 1
    request_s: float = 0.0
    byte_s: float = 0.0
    there: frozenset[int] = frozenset()

    def part_bytes(self, sample: int, part: int) -> int:
        """Bytes of a request."""
        shares = self.measured.shares
        share = shares[part] if len(shares) == self.parts else 1 / self.parts
        return max(1, int(int(self.nbytes[sample]) * share))

    def wait_s(self, rng: Random) -> float:
        """A request's latency."""
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
        """See MemoryTier."""
        return partial(_told, self.policy) if self.policy else choose


def _told(policy: str, *, shards: float, share: float, **_: object) -> Choice:
    ahead = look_ahead(shards, share) if policy == "next-use" else 0
    return Choice(policy, ahead, f"{policy}: as it was told")


class _NoBytes(Blocks):
    """Blocks of nothing."""

    def __init__(self) -> None:
        self._numbers = count()

    def allocate(self, nbytes: int) -> tuple[int, memoryview]:
        return next(self._numbers), memoryview(b"")

    def publish(self, block: int) -> int:
        return 1

    def free(self, block: int) -> None:
        pass


class Link:
    """The rate of a storage, in bytes a second: one answer comes after the other, whoever has asked."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def transfer_s(self, now: float, nbytes: int) -> float:
        """How long it takes until so many bytes have come, after all that were asked for before."""
        self._free_at = max(self._free_at, now) + nbytes / self._bytes_per_s
        return self._free_at - now


def order_of(orders: Orders, epoch: int) -> Integers:
    """The keys of an epoch; here they are known."""
    order = orders.order(epoch)
    assert order is not None
    return order


class VirtualStorage:
    """Reads the samples that ``orders`` name, epoch by epoch; see ``simulation.reading.Reading``.

    ``shards``: an epoch reads one sample in so many. ``link``: shared with others; else one of its own.
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
        link: Link | None = None,
    ) -> None:
        self._link = link or Link(storage.measured.bytes_per_s)
        self.ahead = -(-READ_AHEAD // batch)
        self.reads: list[int] = []  # of each epoch that was begun
        self._storage, self._orders, self._shards, self._rng = storage, orders, shards, Random(seed)
        samples = len(storage.nbytes)
        memory = None if tier is None else MemoryTier(tier.budget(storage), samples, decide=tier.decide)
        self._service = Service(_NoBytes(), ReaderSettings.ahead_bytes, self._tell, memory)
        self._service.pool = self
        self._concurrency = Concurrency(64, 1024) if storage.measured.remote else Concurrency(16, 64)
        self._hedging, self._telling = Hedging(), Telling()
        self._queue: list[tuple[int, Source]] = []
        self._began: dict[int, float] = {}  # requests under way, by number: since when
        self._twice: set[int] = set()  # of these, asked for a second time
        self._sizes: dict[int, int] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._now = self._loop_at = 0.0
        self._timer = _NEVER
        self._told: list[int] = []
        self._order = order_of(orders, 0)
        self._at = 0

    # --- what the loader says ----------------------------------------------------------------------------------

    def begin(self, now: float, epoch: int) -> None:
        self._now = now
        self._order, self._at = order_of(self._orders, epoch), 0
        self.reads.append(0)
        self._service.begin(Begun(epoch, self._orders if self._shards > 1 else None, self._shards))

    def want(self, now: float, place: int, serials: range) -> None:
        self._now = now
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
            self._after(0.0, partial(self._are_there, here))

    def _are_there(self, serials: list[int]) -> None:
        self._told += serials

    def _keys(self, key: int) -> tuple[Key, ...]:
        return tuple(Source(f"sample://{key}/{part}").key for part in range(self._storage.parts))

    def release(self, now: float, serials: Iterable[int]) -> None:
        self._now = now
        self._service.release(serials)
        self._tell_in(self._telling.look(self._service.there))

    def next_at(self) -> float:
        return min(self._events[0][0] if self._events else _NEVER, self._timer)

    def advance(self, until: float) -> Arrival | None:
        while not self._told:
            at = self.next_at()
            if at > until or at == _NEVER:
                return None
            self._now = at
            if at == self._timer:
                self._timer = _NEVER
                self._are_there([serial for serial, _ in self._telling.take()])
            else:
                heappop(self._events)[2]()
        told, self._told = self._told, []
        return Arrival(self._now, told)

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heappush(self._events, (self._now + seconds, next(self._numbers), act))

    def _tell(self, told: Told) -> None:
        self._tell_in(self._telling.add(told, self._service.there))

    def _tell_in(self, delay: float | None) -> None:
        if delay is not None:
            self._timer = self._now + delay

    # --- the pool ----------------------------------------------------------------------------------------------

    def submit(self, number: int, source: Source) -> None:
        """See ``sources.pool.Pool``."""
        heappush(self._queue, (number, source))
        self._start()

    def cancel(self, number: int) -> None:
        """Nothing is cancelled here: epochs are read to their end."""

    def _start(self) -> None:
        while self._queue and len(self._began) < self._concurrency.allowed(behind=self._service.behind()):
            number, source = heappop(self._queue)
            self._began[number] = self._now
            self.reads[-1] += 1
            key, part = map(int, source.path.removeprefix("sample://").split("/"))
            self._sizes[number] = self._storage.part_bytes(key, part)
            self._send(number)
            self._watch(number)

    def _send(self, number: int, *, second: bool = False) -> None:
        wait_s = self._at_work(self._storage.request_s / 2) + self._storage.wait_s(self._rng)
        self._after(wait_s, partial(self._transfer, number, second))

    def _watch(self, number: int) -> None:
        """Ask a second time for what takes too long, as attempts.py does for URLs; whoever answers first counts."""
        patience = self._hedging.patience_s
        if patience is not None and self._storage.measured.remote:
            late = self._began[number] + patience - self._now
            self._after(max(0.0, late), partial(self._takes_long, number))

    def _takes_long(self, number: int) -> None:
        if number in self._began:
            self._hedging.overdue(number, self._began[number])
            self._ask_again()

    def _ask_again(self) -> None:
        now = self._now + SLACK_S
        at_its_limit = self._concurrency.at_its_limit
        while (number := self._hedging.next(now, at_its_limit=at_its_limit)) is not None:
            self._twice.add(number)
            self._send(number, second=True)

    def _at_work(self, seconds: float) -> float:
        """The event loop asks for something, or takes what has come, once it is through with all before. Returns how
        long that is from now."""
        self._loop_at = max(self._loop_at, self._now) + seconds
        return self._loop_at - self._now

    def _transfer(self, number: int, second: bool) -> None:
        if number in self._began:
            seconds = self._link.transfer_s(self._now, self._sizes[number])
            self._after(seconds, partial(self._arrived, number, second))

    def _arrived(self, number: int, second: bool) -> None:
        if number in self._began:
            seconds = self._storage.request_s / 2 + self._sizes[number] * self._storage.byte_s
            self._after(self._at_work(seconds), partial(self._ended, number, second))

    def _ended(self, number: int, second: bool) -> None:
        if number not in self._began:
            return
        if number in self._twice:
            self._twice.discard(number)
            self._hedging.hedged(won=second)
        full = bool(self._queue) and len(self._began) >= self._concurrency.limit and self._service.behind()
        seconds, size = self._now - self._began.pop(number), self._sizes.pop(number)
        self._concurrency.finished(self._now, seconds, full=full)
        patient = self._hedging.patience_s is not None
        self._hedging.finished(number, seconds)
        if not patient:  # it may be known by now
            for each in self._began:
                self._watch(each)
        self._ask_again()
        self._start()
        self._service.done(number, number, size, None, seconds)
