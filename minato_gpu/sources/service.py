"""The reader process without its sockets: wanted bytes are read in order of need, and stay until they are released.

A *ticket* stands for a sample; each has one source or several. Those of a *place* belong to one batch of the sampler's.
Reads are started in the order of tickets while what is ready or under way stays below a limit in bytes;
what the oldest place misses is always read, or nothing would go on. Tickets that want the same source share one copy.

Where there are *tiers* (memory_tier.py, disk_pool.py), bytes stay for later epochs: what the tier in memory keeps is
not freed as it is released, and the tier on disk is given all to write. Both have budgets of their own.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minato_gpu.sources.blocks import ASKED, NOWHERE, Blocks
from minato_gpu.sources.fields import FieldPolicy
from minato_gpu.sources.memory_tier import NO_ITEM, Begun, Copy, MemoryTier
from minato_gpu.sources.pool import Pool
from minato_gpu.sources.reading import Place
from minato_gpu.sources.sent_samples import SentSample
from minato_gpu.sources.source import FIELDS, Key, Source, fields_key

if TYPE_CHECKING:
    from minato_gpu.sources.disk_pool import DiskPool

Wanted = tuple[int, int, tuple[Key, ...]]
"""A ticket, its sample (the data set's index; -1 where that is no whole number) and the keys of its sources."""

Ready = tuple[int, tuple[Place, ...]]
"""A ticket whose bytes are there: where. What could not be read is missing: the worker reads it, and raises."""


@dataclass(slots=True, eq=False)
class SourceBytes:
    """The bytes of one source while tickets want them: to be read, being read, or in memory."""

    key: Key
    number: int  # number of the read
    place: int  # place of the first ticket that wants them
    sample: int = -1  # sample of the first ticket that wants them
    epoch: int = 0  # epoch in which that ticket wants them
    item: int = NO_ITEM
    at: int = 0  # position of the access that they were read for
    users: int = 0  # tickets that want them
    block: int = NOWHERE
    nbytes: int = 0
    stamp: int = 0
    started: bool = False
    done: bool = False
    kept: bool = False  # the tier in memory keeps them, and owns the block
    waiting: list[PendingTicket] = field(default_factory=list)

    def take(self, copy: Copy) -> bool:
        """Takes the bytes from a copy in memory, whose block stays the tier's. Returns True."""
        self.block, self.nbytes, self.stamp = copy.block, copy.nbytes, copy.stamp
        self.done = self.kept = True
        return True


@dataclass(slots=True, eq=False)
class PendingTicket:
    """A ticket, and the bytes of its sources in their order."""

    number: int
    place: int
    asked: int = -1  # the sample whose fields its worker is to send, if it is
    bytes: list[SourceBytes] = field(default_factory=list)
    missing: int = 0  # sources whose bytes have not arrived


class Service:
    """Reads the bytes that tickets want, and keeps them until they are released.

    ``ready`` is called once with each ticket of which all reads have ended, whether or not they succeeded. ``limit``:
    most bytes that are read and not released, beside those that ``memory`` keeps; only the oldest place's may exceed
    it. The caller sets ``pool`` before the first ``want``, and ``disk`` and ``fields`` where there are such.
    """

    def __init__(
        self, blocks: Blocks, limit: int, ready: Callable[[Ready], None], memory: MemoryTier | None = None
    ) -> None:
        self.pool: Pool
        self.disk: DiskPool | None = None
        self.fields: FieldPolicy | None = None
        self.reads = 0  # reads from storage that have succeeded
        self.read_bytes = 0  # bytes of those
        self.failed = 0  # reads that have failed
        self.there = 0  # tickets whose bytes have arrived, and that are not released
        self.shared = 0  # sources that were under way or there for another ticket
        self.from_peers = 0  # sources whose bytes came from another host's cache
        self._blocks = blocks
        self._limit = limit
        self._ready = ready
        self._memory = memory
        self._numbers = 0
        self._tickets: dict[int, PendingTicket] = {}
        self._bytes: dict[Key, SourceBytes] = {}
        self._queue: deque[SourceBytes] = deque()  # not started
        self._started: dict[int, SourceBytes] = {}  # reads that have been started and are not done, by number
        self._ahead = 0  # bytes that have arrived and are not released, and the expected bytes of reads under way
        self._typical = 0  # expected bytes of a source whose length is not declared: a mean
        self._known = 0  # sources that this is the mean of, 100 at most
        self._parts = 1  # sources of a sample
        self._epoch = 0  # epoch of the tickets that are wanted next

    # --- what the loader says --------------------------------------------------------------------------------

    def begin(self, begun: Begun) -> None:
        """Begins an epoch: tickets that are wanted from now on belong to it. What is kept as fields is chosen anew."""
        self._epoch = begun.epoch
        if self._memory is not None:
            self._memory.begin(begun)
        self._choose()

    def want(self, place: int, tickets: Sequence[Wanted]) -> None:
        """Asks for the bytes of tickets of one place (all or some of them), in the order of need.

        Places come in rising order.
        """
        for number, sample, keys in tickets:
            ticket = self._tickets[number] = PendingTicket(number, place)
            found, items, asked = self._planned(sample, keys)
            if asked:
                ticket.asked = sample
            if self.disk is not None:
                self.disk.following.wanted(len(keys))
            for key, item in zip(found, items, strict=True):
                self._want(ticket, sample, key, item)
            if not ticket.missing:
                self._complete(ticket)
        self._start()

    def _planned(self, sample: int, keys: Sequence[Key]) -> tuple[Sequence[Key], Sequence[int], bool]:
        self._parts = len(keys)
        if self.fields is not None:
            return self.fields.plan(sample, keys)
        return keys, (NO_ITEM,) * len(keys) if self._memory is None else self._memory.items(sample, len(keys)), False

    def _want(self, ticket: PendingTicket, sample: int, key: Key, item: int) -> None:
        found = self._bytes.get(key)
        if found is not None and found.kept:
            self.shared += 1
            if self._memory is not None and item != NO_ITEM:
                self._memory.skip(1)
        else:
            found = SourceBytes(key, self._numbers, ticket.place, sample, self._epoch, item)
            self._numbers += 1
            if self._find(found):
                self._bytes[key] = found
            else:
                self._queue.append(found)
        found.users += 1
        ticket.bytes.append(found)
        if not found.done:
            found.waiting.append(ticket)
            ticket.missing += 1

    def _find(self, each: SourceBytes) -> bool:
        """Takes the bytes from the tier in memory, if it has them. Returns whether it has."""
        if self._memory is None or each.item == NO_ITEM:
            return False
        each.at, copy = self._memory.access(each.key)
        if copy is not None:
            self._pass(each)
        return copy is not None and each.take(copy)

    def release(self, tickets: Iterable[int]) -> None:
        """Releases the bytes of tickets whose samples have been prepared, or that are not wanted any more."""
        for number in tickets:
            ticket = self._tickets.pop(number, None)
            if ticket is None:
                continue
            self.there -= not ticket.missing
            for each in ticket.bytes:
                self._leave(each)
        self._start()

    def drop(self) -> None:
        """Releases all tickets, and forgets what was to be read for them."""
        self.release(list(self._tickets))
        self._queue.clear()

    # --- what becomes of sources -----------------------------------------------------------------------------

    def _leave(self, each: SourceBytes) -> None:
        """Removes one user of the bytes; those without a user are dropped."""
        each.users -= 1
        if not each.users:
            self._let_go(each)

    def _let_go(self, each: SourceBytes) -> None:
        if self._bytes.get(each.key) is each:
            del self._bytes[each.key]
        if each.done:
            self._free(each)
        elif each.started:
            self.pool.cancel(each.number)
        else:
            each.done = True  # still queued

    def _free(self, each: SourceBytes) -> None:
        if each.kept:
            return
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
            if each.done or self._is_there(each):
                continue
            self._bytes[each.key] = each
            each.started, each.nbytes = True, size
            self._ahead += size
            self._started[each.number] = each
            self.pool.submit(each.number, Source.of(each.key))

    def _is_there(self, each: SourceBytes) -> bool:
        """Shares bytes that another ticket has had read, or that a tier keeps by now. Returns False if there are none.

        Found out no sooner than they would be read: what is wanted much later must not keep bytes from being freed, or
        a small set of large samples would stay in memory as a whole.
        """
        live = self._bytes.get(each.key)
        if live is None:
            copy = None if self._memory is None or each.item == NO_ITEM else self._memory.look_again(each.key, each.at)
            if copy is None or not each.take(copy):
                return False
            live = self._bytes[each.key] = each
        else:
            self._share(each, live)
        self._pass_on(live, each)
        return True

    def _share(self, each: SourceBytes, live: SourceBytes) -> None:
        """Makes the tickets that want ``each`` users of ``live``, whose bytes are those of the same source."""
        self.shared += 1
        if self._memory is not None and each.item != NO_ITEM:
            self._memory.was_shared()
        each.done, live.users = True, live.users + each.users
        for ticket in each.waiting:
            ticket.bytes[ticket.bytes.index(each)] = live

    def _pass_on(self, live: SourceBytes, each: SourceBytes) -> None:
        """Completes the tickets that wait for ``each``, if ``live`` has arrived; else they wait for that."""
        waiting, each.waiting = each.waiting, []
        if not live.done:
            live.waiting += waiting
            return
        for ticket in waiting:
            ticket.missing -= 1
            if not ticket.missing and self._tickets.get(ticket.number) is ticket:  # not one of an earlier run
                self._complete(ticket)

    def may_keep(self, number: int) -> bool:
        """Returns whether a tier may keep what a started read will bring."""
        each = self._started[number]
        return self.disk is not None or (self._memory is not None and self._memory.may_keep(each.item, each.nbytes))

    def done(
        self,
        number: int,
        block: int,
        nbytes: int,
        error: BaseException | None,
        *,
        on_disk: bool = False,
        version: bytes | None = None,
        shared: bool = False,
        from_peer: bool = False,
    ) -> None:
        """Called by the pool when a read has ended: ``nbytes`` bytes are in ``block``, or ``error`` says why not.

        ``on_disk``: a copy on disk was read; ``version``: what a copy on disk would be of (None: none may be written);
        ``shared``: it was another loader's read; ``from_peer``: another host's cache sent the bytes.
        """
        each = self._started.pop(number)
        self._ahead += nbytes - each.nbytes
        each.done, each.nbytes, each.block = True, nbytes, block
        if error is not None:
            self.failed += not isinstance(error, CancelledError)
        else:
            self._count(each, on_disk=on_disk, shared=shared, from_peer=from_peer)
            self._read(each, version)
        self._pass_on(each, each)
        if not each.users:
            self._free(each)
        self._start()

    def _count(self, each: SourceBytes, *, on_disk: bool, shared: bool, from_peer: bool) -> None:
        """Counts a read by where its bytes came from."""
        if on_disk and each.users:  # else nobody wants it any more, but may so again
            self._pass(each)
        if shared:
            self.shared += 1
            if self._memory is not None and each.item != NO_ITEM:
                self._memory.was_shared()
        elif from_peer:
            self.from_peers += 1
        elif not on_disk:
            self.reads += 1
            self.read_bytes += each.nbytes

    def _read(self, each: SourceBytes, version: bytes | None) -> None:
        """Publishes the block of a read that has ended, and offers it to the tiers."""
        self._known = min(self._known + 1, 100)
        self._typical += round((each.nbytes - self._typical) / self._known)
        if each.block >= 0:
            each.stamp = self._blocks.publish(each.block)
        if self._memory is not None and each.block >= 0:
            copy = Copy(each.key, each.block, each.nbytes, each.stamp)
            each.kept, going = self._memory.offer(each.item, copy, each.at)
            if each.kept:
                self._ahead -= each.nbytes
            self._gone(going)
        if self._bytes.get(each.key) is each:
            self._write(each, version)

    def _pass(self, each: SourceBytes) -> None:
        """Notes that a copy is used: it leaves the disk unless its sample is wanted again soon after."""
        if self.disk is not None and each.key[0] != FIELDS and not self.disk.following.stays(each.sample, each.epoch):
            self.disk.let_go(each.key)

    def _write(self, each: SourceBytes, version: bytes | None) -> None:
        """Has the bytes written to disk, if they may be kept there and there is room."""
        if self.disk is None or version is None or not self.disk.following.stays(each.sample, each.epoch):
            return
        each.users += 1
        if not self.disk.write(each.key, version, each.block, each.nbytes, lambda: self._written(each)):
            each.users -= 1

    def _written(self, each: SourceBytes) -> None:
        self._leave(each)
        self._start()

    def receive(self, found: SentSample) -> None:
        """Takes in the fields of a sample that a worker has sent, or why there are none. The file is the caller's to
        close."""
        memory, fields, sample, nbytes = self._memory, self.fields, found.number, found.nbytes
        if memory is None or fields is None:
            return
        if found.why_not:
            fields.refuse(found.why_not)
        if found.file < 0:
            return
        fields.observe(nbytes, found.saved_s, found.prepare_s)
        if fields.is_due:
            self._choose()
        if not memory.may_keep(sample, nbytes) or not fields.wants(sample):
            return
        try:
            block, view = self._blocks.allocate(nbytes)
        except MemoryError:  # in pieces: what is kept is of many sizes
            return
        found.fill(view)
        copy = Copy(fields_key(sample), block, nbytes, self._blocks.publish(block))
        kept, going = memory.offer_fields(sample, copy)
        self._gone(going)
        if not kept:
            self._blocks.free(block)

    def _choose(self) -> None:
        if self.fields is not None:
            self._gone(self.fields.choose(self._typical * self._parts))

    def _gone(self, going: Iterable[Copy]) -> None:
        """Frees copies that the tier in memory has dropped; those in use stay until they are released."""
        for gone in going:
            live = self._bytes.get(gone.key)
            if live is not None and live.kept and live.block == gone.block:
                live.kept = False
                self._ahead += live.nbytes
            else:
                self._blocks.free(gone.block)

    def behind(self) -> bool:
        """Returns whether less than half of the wanted tickets have their bytes."""
        return 2 * self.there < len(self._tickets)

    def count_anew(self) -> None:
        """Sets all counts to zero."""
        self.reads = self.read_bytes = self.failed = self.shared = self.from_peers = 0
        if self._memory is not None:
            self._memory.count_anew()

    def counts(self) -> dict[str, Any]:
        """Returns the counts since the workers started, as plain data."""
        kept: dict[str, Any] = {} if self.fields is None else {"kept": self.fields.why()}
        return {
            "reads": self.reads,
            "bytes": self.read_bytes,
            "failed": self.failed,
            "shared": self.shared,
            "from_peers": self.from_peers,
            "bytes_ahead": self._ahead,
        } | ({} if self._memory is None else {"memory": self._memory.counts() | kept})

    def _complete(self, ticket: PendingTicket) -> None:
        self.there += 1
        there = [each for each in ticket.bytes if each.block != NOWHERE]
        places: tuple[Place, ...] = tuple((each.block, each.nbytes, each.stamp, *each.key) for each in there)
        if ticket.asked >= 0:
            places = *places, (ASKED, 0, 0, *fields_key(ticket.asked))
        self._ready((ticket.number, places))
