"""The reader process: one for each loader, apart from its workers, so that no worker ever waits for storage. (One that
loaders share is host_reader.py.)

It receives by a socket what is wanted and what is released, and answers there where bytes are stored (``service.py``).
It ends when the loader's end of the socket closes, or the loader's process does. What is done at about the same time is
reported by one message, and wakes the loader once (``Notifier``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minato_gpu.memory.arena import Arena
from minato_gpu.sources import sent_samples
from minato_gpu.sources.blocks import Blocks
from minato_gpu.sources.disk_retention import DiskRetention
from minato_gpu.sources.fields import FieldPolicy
from minato_gpu.sources.memory_tier import MemoryTier
from minato_gpu.sources.messages import MessageSocket
from minato_gpu.sources.pool import ReaderPool, Reads
from minato_gpu.sources.prepared_samples import PreparedSamples, Sharer
from minato_gpu.sources.sent_samples import SentSample
from minato_gpu.sources.service import Ready, Service, Wanted
from minato_gpu.sources.source import PREPARED, Key
from minato_gpu.util import children
from minato_gpu.util.messages import LOGGER

if TYPE_CHECKING:
    from minato_gpu.sources.disk.tier import DiskTier
    from minato_gpu.sources.disk_pool import DiskPool

_STATS_S = 0.5
PLENTY = 128  # samples: the loader knows so many that nobody waits for more
SOON_S, LATER_S = 3e-3, 100e-3
_SHARE = 4  # what is not announced is a part of what is known, so that a fast loader does not come to the end of that


@dataclass(frozen=True)
class ReaderSettings:
    """The settings of a reader process."""

    ahead_bytes: int = 256 << 20  # most bytes that are read and not used yet (but for what the next batch misses)
    memory_bytes: int = 0  # budget of the tier in memory, in which copies stay; 0: there is none
    disk_bytes: int = 0  # the same on disk
    directory: str = ""  # directory of the tier on disk
    samples: int = 0  # samples of the data set
    workers: int = 1  # workers that prepare them
    keeps_fields: bool = False  # fields of samples are kept in memory
    peers: tuple[str, ...] = ()  # caches of other hosts (peer_discovery.checked_peers)
    share_bytes: int = 0  # budget of prepared samples that stay for other loaders; 0: none do
    fingerprint: str = ""  # fingerprint of what prepares the samples


def main(
    arena: Arena, end: socket.socket, of_fields: socket.socket | None, parent: int, settings: ReaderSettings
) -> None:
    """Runs the reader process to its end, and does not return.

    ``end``: its socket to the loader; ``parent``: process id of the loader's; ``of_fields``: where workers send fields
    (None: none are kept).
    """
    try:
        asyncio.run(_serve(parent, arena, end, of_fields, settings))
    finally:
        os._exit(0)  # nothing that the loader's process has registered for its own end


async def _serve(
    parent: int, arena: Arena, end: socket.socket, of_fields: socket.socket | None, settings: ReaderSettings
) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    try:
        watch = children.descriptor(parent)  # without, the end of the socket has to do
    except ProcessLookupError:
        return
    loop.set_exception_handler(failed)
    if watch is not None:
        loop.add_reader(watch, ended.set)
    memory = MemoryTier(settings.memory_bytes, settings.samples) if settings.memory_bytes else None
    blocks = Blocks(arena)

    def pool_of(service: Service) -> ReaderPool:
        return ReaderPool(blocks, service.done, behind=service.behind, keeps=service.may_keep)

    link = Link(end, settings, blocks, memory, pool_of, ended.set)
    if of_fields is not None and memory is not None:
        link.keep_fields(of_fields, memory)
    try:
        await ended.wait()
    finally:
        await link.close()
        os._exit(0)  # what comes now would change what has been left


def failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs an error that nothing caught, and ends the process if a callback raised it: samples would be waited for in
    vain, and without the process workers read for themselves.

    (A request that failed when another had been answered is no callback.)
    """
    loop.default_exception_handler(context)
    if "handle" in context:
        os._exit(1)


class Link:
    """The connection to one loader, and the service that answers it, for which ``pool_of`` makes a pool.

    ``ended`` is called once the loader has closed its end, or sent what is no message. ``memory``: what stays for later
    epochs is kept there; None: nothing does.
    """

    def __init__(
        self,
        end: socket.socket,
        settings: ReaderSettings,
        blocks: Blocks,
        memory: MemoryTier | None,
        pool_of: Callable[[Service], Reads],
        ended: Callable[[], None],
    ) -> None:
        self._messages, self._settings, self._blocks, self._ended = MessageSocket(end), settings, blocks, ended
        self._loop = asyncio.get_running_loop()
        self._notifier = Notifier()
        self._run = 0
        self._timer: asyncio.TimerHandle | None = None  # to send what is ready
        self._stats_at = 0.0
        self._service = service = Service(blocks, settings.ahead_bytes, self._ready, memory)
        self.pool = service.pool = pool_of(service)
        self._from_workers: socket.socket | None = None  # on which workers send fields, or prepared samples
        self._take: Callable[[SentSample], None] = service.receive
        self._sharer: Sharer | None = None  # decides which tickets are announced, where prepared samples are shared
        self._tier: DiskTier | None = None  # on disk; stays open, so that other runs see that this one lives
        self._disk: DiskPool | None = None  # while there are workers
        self._disk_counts: dict[str, Any] | None = None
        self._loop.add_reader(end.fileno(), self._receive)

    def keep_fields(self, of_fields: socket.socket, memory: MemoryTier) -> None:
        """Keeps fields that workers send."""
        settings, rate = self._settings, self.pool.rate
        self._service.fields = FieldPolicy(memory, settings.samples, settings.workers, lambda: rate.bytes_per_s)
        self._listen_to(of_fields)

    def share(self, prepared: PreparedSamples, of_samples: socket.socket) -> None:
        """Shares prepared samples, which workers send.

        A ticket whose bytes have been read is announced only once it is decided whether this loader prepares the
        sample, or another one has or will.
        """
        self._sharer = prepared.join(self._settings.fingerprint, self._settings.workers, self._announce)
        self._take = self._sharer.receive
        of_samples.setblocking(False)
        self._listen_to(of_samples)

    def _listen_to(self, workers: socket.socket) -> None:
        self._from_workers = workers
        self._loop.add_reader(workers.fileno(), self._receive_from_workers)

    @property
    def _there(self) -> int:
        """Returns how many tickets were announced to the loader, or will be soon, and are not released."""
        return self._service.there if self._sharer is None else len(self._sharer.there)

    def _want(self, place: int, tickets: Sequence[Wanted]) -> None:
        if self._sharer is not None:
            for ticket, _, keys in tickets:
                if keys and keys[-1][0] == PREPARED:
                    self._sharer.want(ticket, keys[-1][1])
            tickets = [(ticket, sample, _of_storage(keys)) for ticket, sample, keys in tickets]
        self._service.want(place, tickets)

    def _release(self, tickets: Sequence[int]) -> None:
        if self._sharer is not None:
            self._sharer.release(tickets)
        self._service.release(tickets)

    def _drop(self) -> None:
        if self._sharer is not None:
            self._sharer.drop()
        self._service.drop()

    def _receive_from_workers(self) -> None:
        """Takes in all that workers have sent.

        It is also called before the engine's message is read: where this process had no core for a while, both have
        come, and the message may ask for a sample that workers have just sent.
        """
        end = self._from_workers
        while end is not None:
            try:
                found = sent_samples.receive(end)
            except OSError:
                self._loop.remove_reader(end.fileno())
                return
            if found is None:
                return
            try:
                self._take(found)
            finally:
                if found.file >= 0:
                    os.close(found.file)

    def _receive(self) -> None:
        try:
            found = self._messages.receive()
            if not all(map(_is_message, found)):
                raise ConnectionError("invalid message")
        except OSError:
            self._loop.remove_reader(self._messages.end.fileno())
            self._ended()
            return
        self._receive_from_workers()
        for kind, run, what in found:
            if run != self._run:
                self._drop()
                self._run, self._notifier = run, Notifier()
            if kind == "say":
                released, wanted = what
                self._release(released)
                self._send_in(self._notifier.look(self._there))
                for place, tickets in wanted:
                    self._want(place, tickets)
            elif kind == "admit":
                if self._sharer is not None:
                    self._sharer.admit(what)
            elif kind == "begin":
                self._open_disk()
                self._service.begin(what)
                if self._disk is not None:
                    self._disk.begin(what)
            else:  # the workers have ended
                self._leave_disk()
                self._loop.call_soon(self._answer_end)  # after what has been written

    def _answer_end(self) -> None:
        """Reports what has been done for the workers that have ended, and counts from zero for the next."""
        self._receive_from_workers()
        self._blocks.trim()
        self._messages.put((self._run, [], self._counts(fully=True)))
        self._flush()
        self._service.count_anew()
        self.pool.count_anew()
        for each in (self._sharer, self._tier):
            if each is not None:
                each.count_anew()
        self._disk_counts = None

    def leave(self) -> None:
        """Forgets a loader that has left; others go on."""
        self._drop()
        if self._timer is not None:
            self._timer.cancel()
        for forget in (self._loop.remove_reader, self._loop.remove_writer):
            forget(self._messages.end.fileno())
        self._messages.end.close()
        if self._sharer is not None and self._from_workers is not None:
            self._sharer.leave()
            self._loop.remove_reader(self._from_workers.fileno())
            self._from_workers.close()

    async def close(self) -> None:
        """Ends what is under way, writes to disk what waits for that, and sends the last counts."""
        await self.pool.close()
        self._leave_disk()
        if self._tier is not None:
            self._tier.close()
        self._messages.put((self._run, [], self._counts(fully=True)))
        with contextlib.suppress(OSError):
            self._messages.flush()

    def _open_disk(self) -> None:
        """Opens the tier on disk with the first epoch of new workers. If that fails, logs it; these workers go
        without."""
        settings, service = self._settings, self._service
        if not settings.disk_bytes or self._disk is not None or self._disk_counts is not None:
            return
        from minato_gpu.sources.disk.directory import CacheDirectoryError
        from minato_gpu.sources.disk.tier import DiskTier
        from minato_gpu.sources.disk_pool import DiskPool

        self._disk_counts = {}
        try:
            if self._tier is None or not self._tier.is_there():
                self._tier = DiskTier(settings.directory, settings.disk_bytes)
        except CacheDirectoryError as error:
            LOGGER.warning("%s; until workers are started anew, nothing is kept on disk.", error)
            return
        following = DiskRetention(settings.samples)
        self._disk = service.pool = service.disk = DiskPool(self._tier, self._blocks, self.pool, following)

    def _leave_disk(self) -> None:
        """Writes what waits to the disk, and reads without it from now on; the tier stays open."""
        disk, service = self._disk, self._service
        if disk is None:
            return
        disk.finish()
        self._disk_counts = disk.counts()
        self._disk, service.disk, service.pool, self.pool.done = None, None, self.pool, service.done

    def _ready(self, ready: Ready) -> None:
        if self._sharer is None:
            self._announce(ready)
        else:
            self._sharer.ready(ready)

    def _announce(self, ready: Ready) -> None:
        self._send_in(self._notifier.add(ready, self._there))

    def _send_in(self, delay: float | None) -> None:
        if delay is not None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(delay, self._send)

    def _send(self) -> None:
        self._timer = None
        ready = self._notifier.take()
        if ready:
            self._messages.put((self._run, ready, self._counts(fully=self._loop.time() >= self._stats_at)))
            self._flush()

    def _counts(self, *, fully: bool) -> dict[str, Any]:
        """Returns what has been done so far; ``fully``: with what takes longer to count."""
        counts = self._service.counts()
        if self._sharer is not None:
            counts["share"] = self._sharer.counts()
        if fully:
            self._stats_at = self._loop.time() + _STATS_S
            counts |= self.pool.stats()
            disk = self._disk_counts if self._disk is None else self._disk.counts()
            if disk:
                counts["disk"] = disk
        return counts

    def _flush(self) -> None:
        try:
            is_sent = self._messages.flush()
        except OSError:
            self._ended()
            return
        if is_sent:
            self._loop.remove_writer(self._messages.end.fileno())
        else:  # the loader is busy
            self._loop.add_writer(self._messages.end.fileno(), self._flush)


def _of_storage(keys: tuple[Key, ...]) -> tuple[Key, ...]:
    """Returns the keys without that of the prepared sample, which storage does not have."""
    return keys[:-1] if keys and keys[-1][0] == PREPARED else keys


def _is_message(found: object) -> bool:
    """Returns whether this is a message of a loader (see ``Reader``)."""
    return isinstance(found, tuple) and len(found) == 3 and found[0] in ("say", "admit", "begin", "end")


class Notifier:
    """Collects tickets whose bytes have arrived until it is time to announce them to the loader.

    A wake-up of the loader costs more than a hundred samples announced by it. So samples are announced together:
    quickly where somebody may be waiting, which is where the loader has few left that it knows of, or where one comes
    late, after those that will be needed after it.
    """

    def __init__(self) -> None:
        self._ready: list[Ready] = []
        self._furthest = -1
        self._soon = False

    def add(self, ready: Ready, there: int) -> float | None:
        """Adds a ticket. ``there``: tickets, with it, that are announced or will be, and are not released.

        Returns in how many seconds to announce what has been collected; None if an earlier answer still holds.
        """
        ticket = ready[0]
        self._ready.append(ready)
        late = ticket < self._furthest - PLENTY
        self._furthest = max(self._furthest, ticket)
        return self.look(there, late=late) or (LATER_S if len(self._ready) == 1 else None)

    def look(self, there: int, *, late: bool = False) -> float | None:
        """Notes that so many are there by now, as some were released; returns as ``add``. ``late``: a ticket has come
        after those that will be needed after it."""
        count = len(self._ready)
        known = there - count
        if not count or self._soon or not (late or known < PLENTY or _SHARE * count > known):
            return None
        self._soon = True
        return SOON_S

    def take(self) -> list[Ready]:
        """Returns all tickets, to be announced now."""
        ready, self._ready, self._soon = self._ready, [], False
        return ready
