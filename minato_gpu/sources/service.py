"""What the reader process does, but for its sockets: bytes that are wanted come in, in order of need, and stay until
they are released.

A *ticket* stands for a sample; each has one source or several. Those of a *place* belong to one batch of the sampler's.
Reads are started in the order of tickets while what lies ready or is under way stays below a limit in bytes;
what the oldest place misses is always read, or nothing would go on. Tickets that want the same source share one copy.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from minato_gpu.sources.blocks import Blocks
from minato_gpu.sources.reading import Key, Place
from minato_gpu.sources.source import Source

Wanted = tuple[int, tuple[Key, ...]]
"""A ticket and its sources."""

Told = tuple[int, tuple[Place, ...]]
"""A ticket whose bytes are there: where. What could not be read is missing: the worker reads it, and raises."""

class Pool(Protocol):
    """What reads: see pool.py."""

    def submit(self, number: int, source: Source) -> None:
        """Read this, after those of lower numbers."""

    def cancel(self, numbers: Iterable[int]) -> None:
        """These are not needed any more. They are done all the same, sooner or later."""


@dataclass(slots=True, eq=False)
class _Bytes:
    """One source's bytes: to be read, being read, or there (``stamp``); ``users``: tickets that want them."""

    key: Key
    number: int
    place: int
    users: int = 0
    block: int = -1
    nbytes: int = 0
    stamp: int = 0
    started: bool = False
    done: bool = False
    waiting: list[_Ticket] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Ticket:
    number: int
    place: int
    bytes: list[_Bytes] = field(default_factory=list)
    missing: int = 0


class Service:
    """``tell`` is called with each ticket whose bytes are there, once. ``limit``: bytes read and not released."""

    def __init__(self, blocks: Blocks, limit: int, tell: Callable[[Told], None]) -> None:
        self.pool: Pool
        self.reads = 0  # done, with their bytes
        self.read_bytes = 0
        self.failed = 0
        self.there = 0  # tickets whose bytes are, and that are not released
        self.shared = 0  # sources that were under way or there for another ticket
        self._blocks = blocks
        self._limit = limit
        self._tell = tell
        self._numbers = 0
        self._tickets: dict[int, _Ticket] = {}
        self._bytes: dict[Key, _Bytes] = {}
        self._queue: deque[_Bytes] = deque()  # not started
        self._started: dict[int, _Bytes] = {}  # by number, not done
        self._ahead = 0  # bytes that are there and not released, and of what is under way those expected
        self._typical = 0  # bytes of a source whose length is not declared

    # --- what the loader says --------------------------------------------------------------------------------

    def want(self, place: int, tickets: Sequence[Wanted]) -> None:
        """Tickets of a place, or some of them, in the order of need; all come after those of earlier places."""
        for number, keys in tickets:
            ticket = self._tickets[number] = _Ticket(number, place)
            for key in keys:
                self._want(ticket, key)
            if not ticket.missing:
                self._told(ticket)
        self._start()

    def _want(self, ticket: _Ticket, key: Key) -> None:
        found = self._bytes.get(key)
        if found is None:
            found = self._bytes[key] = _Bytes(key, self._numbers, ticket.place)
            self._numbers += 1
            self._queue.append(found)
        else:
            self.shared += 1
        found.users += 1
        ticket.bytes.append(found)
        if not found.done:
            found.waiting.append(ticket)
            ticket.missing += 1

    def release(self, tickets: Iterable[int]) -> None:
        """The samples have been prepared, or nobody wants them any more."""
        for number in tickets:
            ticket = self._tickets.pop(number, None)
            if ticket is None:
                continue
            self.there -= not ticket.missing
            for each in ticket.bytes:
                each.users -= 1
                if not each.users:
                    self._let_go(each)
        self._start()

    def drop(self) -> None:
        """Nobody wants anything any more."""
        self.release(list(self._tickets))
        self._queue.clear()

    # --- what becomes of sources -----------------------------------------------------------------------------

    def _let_go(self, each: _Bytes) -> None:
        del self._bytes[each.key]
        if each.done:
            self._free(each)
        elif each.started:
            self.pool.cancel([each.number])
        else:
            each.done = True  # still queued

    def _free(self, each: _Bytes) -> None:
        self._ahead -= each.nbytes
        if each.block >= 0:
            self._blocks.free(each.block)

    def _start(self) -> None:
        oldest = next(iter(self._tickets.values()), None)
        while self._queue:
            each = self._queue[0]
            length = each.key[2]
            size = self._typical if length is None else length
            due = oldest is not None and each.place == oldest.place
            if not due and self._ahead + size > self._limit:
                return
            self._queue.popleft()
            if each.done:
                continue
            each.started, each.nbytes = True, size
            self._ahead += size
            self._started[each.number] = each
            self.pool.submit(each.number, Source(*each.key))

    def done(self, number: int, block: int, nbytes: int, error: BaseException | None) -> None:
        """The pool is through with a source: so many bytes are in a block, or it failed."""
        each = self._started.pop(number)
        self._ahead += nbytes - each.nbytes
        each.done, each.nbytes, each.block = True, nbytes, block
        if error is not None:
            self.failed += not isinstance(error, CancelledError)
        else:
            self.reads += 1
            self.read_bytes += nbytes
            self._typical += round((nbytes - self._typical) / min(self.reads, 100))
            each.stamp = self._blocks.publish(block)
        waiting, each.waiting = each.waiting, []
        for ticket in waiting:
            ticket.missing -= 1
            if not ticket.missing and self._tickets.get(ticket.number) is ticket:  # not one of an earlier run
                self._told(ticket)
        if not each.users:
            self._free(each)
        self._start()

    def behind(self) -> bool:
        """Whether less than half of what is wanted is there."""
        return 2 * self.there < len(self._tickets)

    def counts(self) -> dict[str, int]:
        """What has been done since the process began."""
        return {
            "reads": self.reads,
            "bytes": self.read_bytes,
            "failed": self.failed,
            "shared": self.shared,
            "bytes_ahead": self._ahead,
        }

    def _told(self, ticket: _Ticket) -> None:
        self.there += 1
        there = [each for each in ticket.bytes if each.block >= 0]
        self._tell((ticket.number, tuple(Place(*each.key, each.block, each.nbytes, each.stamp) for each in there)))
