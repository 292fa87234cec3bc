"""The reader process: one for each set of workers, apart from them, so that no worker ever waits for storage.

It is told by a socket what is wanted and what is released, and answers there where bytes lie (``service.py``). It ends
when the loader's end of the socket closes, or the loader's process does. What is done at about the same time is told by
one message, and wakes the loader once (telling.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from minato_gpu import children
from minato_gpu.memory.arena import Arena
from minato_gpu.notices import LOGGER
from minato_gpu.sources import field_transfer
from minato_gpu.sources.blocks import Blocks, space_of
from minato_gpu.sources.field_keeping import FieldKeeping
from minato_gpu.sources.following import Following
from minato_gpu.sources.kept_memory import Table
from minato_gpu.sources.memory_tier import MemoryTier
from minato_gpu.sources.parcels import Parcels
from minato_gpu.sources.placing import Placing
from minato_gpu.sources.pool import ReaderPool
from minato_gpu.sources.service import Service, Told
from minato_gpu.sources.telling import Telling

if TYPE_CHECKING:
    from minato_gpu.sources.disk.tier import DiskTier
    from minato_gpu.sources.disk_pool import DiskPool

_STATS_S = 0.5


@dataclass(frozen=True)
class ReaderSettings:
    """``ahead_bytes``: read and not used yet, at most (but for what the next batch misses). ``memory_bytes``,
    ``disk_bytes``: budgets of the tiers, in which copies of the data set's ``samples`` samples stay (0: there is none);
    ``directory``: of that on disk. ``workers``: how many prepare samples.
    ``table``: from the reader process before, and for the next; ``fields_made_by``: what makes fields now, b"" where
    none are.
    """

    ahead_bytes: int = 256 << 20
    memory_bytes: int = 0
    disk_bytes: int = 0
    directory: str = ""
    samples: int = 0
    workers: int = 1
    table: Table | None = None
    fields_made_by: bytes = b""


def main(
    end: socket.socket,
    parent: int,
    arena: Arena,
    fields: socket.socket | None,
    ring: Callable[[], None],
    settings: ReaderSettings,
) -> None:
    """The process's work, to its end. ``parent``: process id of the loader's; ``fields``: where workers send what is to
    be kept; ``ring`` wakes whoever waits of the loader's process."""
    try:
        asyncio.run(_serve(parent, partial(_Link, end, parent, arena, fields, ring, settings)))
    finally:
        os._exit(0)  # nothing that the loader's process has registered for its own end


async def _serve(parent: int, make_link: Callable[[asyncio.Event], _Link]) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    try:
        watch = children.descriptor(parent)  # without, the end of the socket has to do
    except ProcessLookupError:
        return
    loop.set_exception_handler(_failed)
    if watch is not None:
        loop.add_reader(watch, ended.set)
    link = make_link(ended)
    try:
        await ended.wait()
    finally:
        await link.close()
        os._exit(0)  # what comes now would change what has been left


def _failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What was being done is left half done, and samples would be waited for in vain: better no such process, after
    which workers read for themselves. (A request that failed when another had been answered has no handle.)"""
    loop.default_exception_handler(context)
    if "handle" in context:
        os._exit(1)


class _Link:
    """The socket, and the service behind it."""

    def __init__(
        self,
        end: socket.socket,
        parent: int,
        arena: Arena,
        fields: socket.socket | None,
        ring: Callable[[], None],
        settings: ReaderSettings,
        ended: asyncio.Event,
    ) -> None:
        self._parcels, self._ring, self._ended = Parcels(end), ring, ended
        self._loop = asyncio.get_running_loop()
        self._telling = Telling()
        self._run = 0
        self._timer: asyncio.TimerHandle | None = None  # to send what is to be told
        self._stats_at = 0.0
        self._memory = _taken_up(arena, settings)
        self._table, self._arena, self._fields_made_by = settings.table, arena, settings.fields_made_by
        self._fields = fields
        blocks = Blocks(arena)
        self._service = service = Service(blocks, settings.ahead_bytes, self._tell, self._memory)
        self._disk: DiskPool | None = None
        tier = _opened(settings)
        placing = Placing(self._memory, service.expected, copies=tier is not None)
        self._pool = service.pool = ReaderPool(blocks, service.done, behind=service.behind, placing=placing)
        if tier is not None:
            from minato_gpu.sources.disk_pool import DiskPool

            following = Following(settings.samples, settings.memory_bytes)
            self._disk = service.pool = service.disk = DiskPool(tier, blocks, self._pool, following)
        if fields is not None and self._memory is not None:
            samples, workers = settings.samples, settings.workers
            service.fields = FieldKeeping(self._memory, samples, workers, lambda: self._pool.rate.bytes_per_s)
            self._loop.add_reader(fields.fileno(), self._take_fields)
        self._loop.add_reader(end.fileno(), self._receive)

    def _take_fields(self) -> None:
        """All that have come. Before a sample is wanted, too, which may be one of those: where this process had no core
        for a while, the engine's message has come as well."""
        end = self._fields
        while end is not None and self._service.fields is not None:
            try:
                found = field_transfer.receive(end)
            except OSError:
                self._loop.remove_reader(end.fileno())
                return
            if found is None:
                return
            if found.file >= 0:
                try:
                    self._service.receive(found.sample, found.nbytes, found.saved_s, found.prepare_s, found.fill)
                finally:
                    os.close(found.file)

    def _receive(self) -> None:
        try:
            found = self._parcels.receive()
        except OSError:
            self._loop.remove_reader(self._parcels.end.fileno())
            self._ended.set()
            return
        self._take_fields()
        for kind, run, what in found:
            if run != self._run:
                self._service.drop()
                self._run, self._telling = run, Telling()
            if kind == "say":
                released, wanted = what
                self._service.release(released)
                self._send_in(self._telling.look(self._service.there))
                for place, tickets in wanted:
                    self._service.want(place, tickets)
            elif kind == "begin":
                self._service.begin(what)
                if self._disk is not None:
                    self._disk.begin(what)

    async def close(self) -> None:
        """End what is under way; what is kept in memory is left to the next, before a slow disk takes too long."""
        await self._pool.close()
        if self._memory is not None and self._table is not None:
            self._take_fields()  # what the last samples have left, where cores were busy
            if self._service.fields is not None:
                self._service.fields.note()
            self._table.leave(self._memory.left(), self._fields_made_by)
        if self._disk is not None:
            self._disk.finish()
        if self._memory is not None:
            self._arena.forsake(_blocks_of(self._memory))  # what has been written by now, too
        self._parcels.put((self._run, [], self._counts(fully=True)))
        with contextlib.suppress(OSError):
            self._parcels.flush()
        if self._disk is not None:
            self._disk.close()

    def _tell(self, told: Told) -> None:
        self._send_in(self._telling.add(told, self._service.there))

    def _send_in(self, delay: float | None) -> None:
        if delay is not None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(delay, self._send)

    def _send(self) -> None:
        self._timer = None
        told = self._telling.take()
        if told:
            self._parcels.put((self._run, told, self._counts(fully=self._loop.time() >= self._stats_at)))
            self._flush()

    def _counts(self, *, fully: bool) -> dict[str, Any]:
        """What has been done so far; ``fully``: with what takes longer to tell."""
        counts = self._service.counts()
        if fully:
            self._stats_at = self._loop.time() + _STATS_S
            counts |= self._pool.stats()
            if self._disk is not None:
                counts["disk"] = self._disk.counts()
        return counts

    def _flush(self) -> None:
        try:
            is_sent = self._parcels.flush()
        except OSError:
            self._ended.set()
            return
        if is_sent:
            self._loop.remove_writer(self._parcels.end.fileno())
            self._ring()
        else:  # the loader is busy: it will have been rung for
            self._loop.add_writer(self._parcels.end.fileno(), self._flush)


def _taken_up(arena: Arena, settings: ReaderSettings) -> MemoryTier | None:
    """The tier in memory, with what the process before has left there; all else in the arena is free."""
    if not settings.memory_bytes:
        return None
    tier = MemoryTier(settings.memory_bytes, settings.samples)
    left = None if settings.table is None else settings.table.take(settings.fields_made_by)
    if left is not None:
        tier.take_up(*left)
        arena.occupy(_blocks_of(tier))
        arena.forsake(_blocks_of(tier))
    return tier


def _blocks_of(tier: MemoryTier) -> list[tuple[int, int]]:
    """Where its copies lie in the arena, and the memory that each takes."""
    return [(copy.block, space_of(copy.nbytes)) for _, copy in tier.left()[1]]


def _opened(settings: ReaderSettings) -> DiskTier | None:
    """The tier on disk, unless what was possible as the loader was made is so no longer."""
    if not settings.disk_bytes:
        return None
    from minato_gpu.sources.disk.directory import CacheDirectoryError
    from minato_gpu.sources.disk.tier import DiskTier

    try:
        return DiskTier(settings.directory, settings.disk_bytes)
    except CacheDirectoryError as error:
        LOGGER.warning("%s; until workers are started anew, nothing is kept on disk.", error)
        return None
