"""The reader process: one for each set of workers, apart from them, so that no worker ever waits for storage.

It is told by a socket what is wanted and what is released, and answers there where bytes lie (``service.py``). It ends
when the loader's end of the socket closes, or the loader's process does. What is done at about the same time is told by
one message, and wakes the loader once.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from minato_gpu.memory.arena import Arena
from minato_gpu.sources.blocks import Blocks
from minato_gpu.sources.pool import ReaderPool
from minato_gpu.sources.service import Service, Told

LARGEST = 1 << 20  # bytes of a message
TICKETS = 128  # of one message, at most: each may name paths of 4 KB
_TOGETHER_S = 3e-3  # what is done meanwhile is told together,
_PLENTY, _LATER_S = 128, 30e-3  # or in so long, where as many samples are there that nobody can be waiting
_STATS_S = 0.5


@dataclass(frozen=True)
class ReaderSettings:
    """``ahead_bytes``: read and not used yet, at most (but for what the next batch misses)."""

    ahead_bytes: int = 256 << 20


def main(end: socket.socket, parent: int, arena: Arena, ring: Callable[[], None], settings: ReaderSettings) -> None:
    """The process's work, to its end. ``parent``: process id of the loader's; ``ring`` wakes whoever of it waits."""
    try:
        asyncio.run(_serve(end, parent, arena, ring, settings))
    finally:
        os._exit(0)  # nothing that the loader's process has registered for its own end


async def _serve(
    end: socket.socket, parent: int, arena: Arena, ring: Callable[[], None], settings: ReaderSettings
) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    try:
        watch = os.pidfd_open(parent)
    except ProcessLookupError:
        return
    loop.add_reader(watch, ended.set)
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    link = _Link(end, ring, settings, arena, ended)
    try:
        await ended.wait()
    finally:
        await link.pool.close()


class _Link:
    """The socket, and the service behind it."""

    def __init__(
        self, end: socket.socket, ring: Callable[[], None], settings: ReaderSettings, arena: Arena, ended: asyncio.Event
    ) -> None:
        end.setblocking(False)
        self._end, self._ring, self._ended = end, ring, ended
        self._loop = asyncio.get_running_loop()
        self._told: list[Told] = []
        self._unsent: deque[bytes] = deque()
        self._run = 0
        self._is_due: asyncio.TimerHandle | None = None
        self._stats_at = 0.0
        blocks = Blocks(arena)
        self._service = Service(blocks, settings.ahead_bytes, self._tell)
        self.pool = self._service.pool = ReaderPool(blocks, self._service.done, behind=self._service.behind)
        self._loop.add_reader(end.fileno(), self._receive)

    def _receive(self) -> None:
        while True:
            try:
                data = self._end.recv(LARGEST)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._loop.remove_reader(self._end.fileno())
                self._ended.set()
                return
            kind, run, what = pickle.loads(data)
            if run != self._run:
                self._service.drop()
                self._run, self._told = run, []
            if kind == "want":
                self._service.want(*what)
            elif kind == "release":
                self._service.release(what)

    def _tell(self, told: Told) -> None:
        self._told.append(told)
        if self._is_due is None:
            plenty = self._service.there >= _PLENTY
            self._is_due = self._loop.call_later(_LATER_S if plenty else _TOGETHER_S, self._send)

    def _send(self) -> None:
        self._is_due = None
        told, self._told = self._told, []
        for at in range(0, len(told), TICKETS):
            counts = self._service.counts()
            if self._loop.time() >= self._stats_at:
                self._stats_at = self._loop.time() + _STATS_S
                counts |= self.pool.stats()
            self._unsent.append(pickle.dumps((self._run, told[at : at + TICKETS], counts), 5))
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._end.send(self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:  # the loader is busy: it will have been rung for
            self._loop.add_writer(self._end.fileno(), self._flush)
            return
        except OSError:
            self._ended.set()
            return
        self._loop.remove_writer(self._end.fileno())
        self._ring()
