"""Reads that several loaders share: a source that more than one wants is read once, and stored in memory once.

Each loader has a service (service.py) that asks and is answered as if it were alone; these stand between the services
and one pool. A block that several use is freed with the last of them. Loaders are read for in turn, whoever has asked
for more: what one needs next is not read after all that another wants to have ahead.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from minato_gpu.memory.arena import Arena
from minato_gpu.sources.blocks import NOWHERE, Blocks
from minato_gpu.sources.memory_tier import Begun, Copy, MemoryTier
from minato_gpu.sources.pool import Pool, ReaderPool
from minato_gpu.sources.service import Service
from minato_gpu.sources.source import Key, Source

_TURN = 1 << 32  # the pool's numbers are a turn, and a count that tells apart what has the same
_SOONER = 64  # turns that are worth asking the pool for another number
_WHY = "minio: loaders of this host share it, so what came first stays"


class Hastening(Pool, Protocol):
    """A pool that can be asked to take a read earlier than it was submitted for."""

    def hasten(self, number: int, sooner: int, source: Source) -> bool:
        """Gives a read the lower number ``sooner``. Returns False if it has begun."""


class SharedTier(MemoryTier):
    """A tier in memory for several loaders, whatever their data sets: a copy is known by its key, and what came first
    stays. Each loader has a ``part``, which has the same copies, and counts of its own."""

    def __init__(self, budget: int, whole: SharedTier | None = None) -> None:
        super().__init__(budget, samples=0)
        self.owns: Callable[[Key], bool] = lambda key: True  # whether this host is to keep a source, of the whole
        self._whole = self if whole is None else whole
        self._copies, self._items, self._policy = self._whole._copies, self._whole._items, self._whole._policy

    def part(self) -> SharedTier:
        """Returns the tier as one loader sees it."""
        return SharedTier(self.budget, self)

    def begin(self, begun: Begun) -> None:
        """Ignores the epoch: one loader's orders are of no use to the others."""

    def items(self, sample: int, parts: int) -> tuple[int, ...]:
        """Returns 0 for each source: all may be kept, and copies are found by their keys alone."""
        return (0,) * parts

    def offer(self, item: int, copy: Copy, now: int) -> tuple[bool, list[Copy]]:
        """Offers a copy under a number of its own.

        It is refused where another loader has had it kept meanwhile, or another host is to keep it.
        """
        if not self._whole.owns(copy.key):
            return False, []
        return super().offer(len(self._copies), copy, now)

    def counts(self) -> dict[str, int | str]:
        """Returns what is kept for all loaders, and this loader's hits and misses."""
        return super().counts() | {"why": _WHY}


@dataclass(slots=True, eq=False)
class _Read:
    """A read of the pool's, until nobody has its bytes any more."""

    source: Source
    number: int
    block: int = NOWHERE
    nbytes: int = 0
    # loaders' pools that wait, with their own numbers
    clients: list[tuple[ClientPool, int]] = field(default_factory=list)


class SharedBlocks(Blocks):
    """Blocks that may have several users; ``freed`` is called as the last one goes."""

    def __init__(self, arena: Arena, freed: Callable[[int], None]) -> None:
        super().__init__(arena)
        self._freed = freed
        self._more: dict[int, int] = {}  # users beside the first

    def add_user(self, block: int) -> None:
        """Adds a user of the block."""
        self._more[block] = self._more.get(block, 0) + 1

    def free(self, block: int) -> None:
        """Removes a user of the block, which is freed with the last one."""
        more = self._more.pop(block, 0)
        if more > 1:
            self._more[block] = more - 1
        if not more:
            self._freed(block)
            super().free(block)


class SharedReads:
    """The reads of all loaders. ``soon`` calls a function a little later, as an event loop's ``call_soon`` does."""

    pool: Hastening

    def __init__(self, arena: Arena, soon: Callable[..., object]) -> None:
        self.blocks, self.soon = SharedBlocks(arena, self._freed), soon
        self._clients: list[ClientPool] = []
        self._reads: dict[int, _Read] = {}  # reads under way, by the pool's numbers
        self._there: dict[int, _Read] = {}  # reads whose bytes are in memory, by block
        self._by_source: dict[Source, _Read] = {}  # all reads, under way or done, that further loaders may share
        self._turn = 0  # turn of the last read that ended
        self._count = 0

    def client(self, service: Service, pool: ReaderPool, more: Callable[[], dict[str, Any]] = dict) -> ClientPool:
        """Returns the pool for one loader's ``service``; ``pool`` counts, and ``more`` returns other counters."""
        client = ClientPool(self, service, pool, more)
        self._clients.append(client)
        return client

    def remove(self, client: object) -> None:
        """Removes the pool of a loader that has left. Its reads under way go on."""
        self._clients = [each for each in self._clients if each is not client]

    def behind(self) -> bool:
        """Returns whether there is a loader of whose wanted tickets less than half have their bytes."""
        return any(client.service.behind() for client in self._clients)

    def may_keep(self, number: int) -> bool:
        """Returns whether memory may keep what a read will bring."""
        client, own = self._reads[number].clients[0]
        return client.service.may_keep(own)

    def submit(self, client: ClientPool, number: int, source: Source) -> None:
        """Reads a source, or shares what is being read or is in memory for another loader."""
        client.turn = max(client.turn + 1, self._turn)
        read = self._by_source.get(source)
        if read is not None and read.block != NOWHERE:
            self.blocks.add_user(read.block)
            self.soon(client.shared, number, read.block, read.nbytes)
            return
        self._count += 1
        turn = client.turn * _TURN + self._count
        is_new = read is None
        if read is None:
            read = self._by_source[source] = self._reads[turn] = _Read(source, turn)
        read.clients.append((client, number))
        client.reads[number] = read
        if is_new:
            self.pool.submit(turn, source)
        elif read.number - turn > _SOONER * _TURN:
            self._hasten(read, turn)

    def _hasten(self, read: _Read, turn: int) -> None:
        """Gives a read that is under way the lower number ``turn``, unless it has begun."""
        self._reads[turn] = read
        has_begun = not self.pool.hasten(read.number, turn, read.source)
        del self._reads[turn if has_begun else read.number]
        read.number = read.number if has_begun else turn

    def cancel(self, client: ClientPool, number: int) -> None:
        """Cancels this loader's part in a read; the read goes on if others wait for it."""
        read = client.reads.get(number)
        if read is None:  # the answer is on its way
            return
        if len(read.clients) == 1:
            self._forget(read)  # nobody else is to wait for what may not come
            self.pool.cancel(read.number)
            return
        read.clients.remove((client, number))
        del client.reads[number]
        self.soon(client.done, number, NOWHERE, 0, CancelledError())

    def done(
        self,
        number: int,
        block: int,
        nbytes: int,
        error: BaseException | None,
        *,
        from_peer: bool = False,
    ) -> None:
        """Called by the pool when a read has ended: answers all services that wait for it."""
        read = self._reads.pop(number)
        self._turn = max(self._turn, number // _TURN)
        read.block, read.nbytes = block, nbytes
        clients, read.clients = read.clients, []
        if block >= 0:
            self._there[block] = read
            for _ in clients[1:]:
                self.blocks.add_user(block)
        else:
            self._forget(read)
        for at, (client, own) in enumerate(clients):
            del client.reads[own]
            client.done(own, block, nbytes, error, shared=at > 0, from_peer=from_peer)

    def _freed(self, block: int) -> None:
        read = self._there.pop(block, None)
        if read is not None:
            self._forget(read)

    def _forget(self, read: _Read) -> None:
        if self._by_source.get(read.source) is read:
            del self._by_source[read.source]


class ClientPool:
    """The reads of one loader, as its service sees them: a pool of its own. What it counts is all loaders'."""

    def __init__(
        self, shared: SharedReads, service: Service, pool: ReaderPool, more: Callable[[], dict[str, Any]]
    ) -> None:
        self.service, self.done, self.turn = service, service.done, 0
        self._more = more
        self.reads: dict[int, _Read] = {}  # not done, by the loader's numbers
        self._shared, self._pool, self.rate = shared, pool, pool.rate

    def shared(self, number: int, block: int, nbytes: int) -> None:
        """Reports a read whose bytes another loader has had read."""
        self.done(number, block, nbytes, None, shared=True)

    def submit(self, number: int, source: Source) -> None:
        """Reads a source in the loader's turn, unless another loader has it read."""
        self._shared.submit(self, number, source)

    def cancel(self, number: int) -> None:
        """Cancels this loader's part in a read; the read goes on if others wait for it."""
        self._shared.cancel(self, number)

    def stats(self) -> dict[str, Any]:
        """Returns counters and latencies of all loaders' reads."""
        return self._pool.stats() | self._more()

    def count_anew(self) -> None:
        """Does nothing: the counters are all loaders'."""

    async def close(self) -> None:
        """Does nothing: the reads go on for the other loaders."""
