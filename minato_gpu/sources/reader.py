"""The loader's side of its reader process (process.py): starts it, sends requests, receives answers.

The process lives as long as its loader: what its tier in memory keeps stays when workers end with an epoch.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing.process
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from time import monotonic
from typing import Any
from weakref import WeakSet, finalize

from minato_gpu.memory.arena import MOST, Arena, round_up
from minato_gpu.memory.shared_memory import LEAST
from minato_gpu.sources import sent_samples
from minato_gpu.sources.memory_tier import Begun
from minato_gpu.sources.messages import SOCKET_BYTES, MessageSocket
from minato_gpu.sources.process import ReaderSettings, main
from minato_gpu.sources.reading import Place
from minato_gpu.sources.service import Ready, Wanted
from minato_gpu.util import children
from minato_gpu.util.messages import LOGGER

_LEAVE_S = 10.0  # what is to be kept may have to be written yet
TOGETHER = 64  # tickets
_FAR = 512  # tickets: what is wanted so long before it enters the window may wait
_NBYTES = 4 << 20  # released: room that the reader is not to miss
_TOO_LARGE = (
    "the cache keeps {budget} bytes in memory, for which {capacity} bytes of address space are reserved: raise the "
    "limits of address space and file size (ulimit -v, ulimit -f), or pass a smaller cache"
)

Want = tuple[int, Sequence[Wanted]]
"""A place of the window, and all or some of its tickets in the order of need (see ``Service.want``)."""

_readers: WeakSet[Reader] = WeakSet()
"""The readers of every loader alive in this process."""


class Outbox:
    """Collects what is wanted and what is released until it is sent.

    Most are wanted long before anybody needs them, and what is released makes room for such. Sent one batch at a time
    they would wake the reader process three times for each.
    """

    def __init__(self) -> None:
        self._wanted: list[Want] = []
        self._tickets = 0
        self._released: list[int] = []
        self._nbytes = 0

    def want(self, place: int, tickets: Sequence[Wanted]) -> None:
        """Adds tickets of a place whose bytes are wanted, after all that were added before; none: does nothing."""
        if tickets:
            self._wanted.append((place, tickets))
            self._tickets += len(tickets)

    def release(self, ticket: int, places: Iterable[Place]) -> None:
        """Adds a ticket whose bytes are not needed any more; ``places``: where they are stored."""
        self._released.append(ticket)
        for place in places:
            self._nbytes += place[1]

    def is_due(self, admitted: int, missing: int) -> bool:
        """Returns whether to send it now: tickets before ``admitted`` are in the window, and the bytes of ``missing``
        of these have not arrived."""
        if not self._tickets and not self._released:
            return False
        if missing or self._tickets >= TOGETHER or len(self._released) >= TOGETHER or self._nbytes >= _NBYTES:
            return True
        return bool(self._tickets) and self._wanted[0][1][0][0] < admitted + _FAR

    def take(self) -> tuple[list[int], list[Want]]:
        """Returns everything, released and wanted, and forgets it."""
        sent = self._released, self._wanted
        self._wanted, self._tickets, self._released, self._nbytes = [], 0, [], 0
        return sent


class Reader:
    """The connection to one reader process, which it starts: ``start(function, *arguments)`` calls that in a process.

    ``stays``: after ``give_back`` the process waits for the next workers; else it ends then. Raises OSError where there
    is no address space for what it is to keep in memory.
    """

    fields: socket.socket | None = None  # socket on which workers send fields that are to be kept
    # socket on which workers send samples for other loaders, and the memory for these
    prepared: tuple[socket.socket, Arena] | None = None
    process: Any = None
    _owner: int

    def __init__(self, start: Callable[..., Any], settings: ReaderSettings, *, stays: bool) -> None:
        with contextlib.ExitStack() as undo:
            arena = arena_of(settings.memory_bytes)
            undo.callback(arena.close)
            ends = [*socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
            for end in ends:
                undo.callback(end.close)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
            ours, theirs = ends
            self._hold(ours, arena, settings, stays=stays)
            theirs_of_fields = None
            if settings.keeps_fields:
                theirs_of_fields, self.fields = sent_samples.pair()
                undo.callback(theirs_of_fields.close)
                undo.callback(self.fields.close)
            self.process = start(main, arena, theirs, theirs_of_fields, self._owner, settings)
            undo.pop_all()
        theirs.close()
        if theirs_of_fields is not None:
            theirs_of_fields.close()
        self._forget_exit = children.closed_at_exit(self.close)

    def _hold(self, end: socket.socket, arena: Arena, settings: ReaderSettings, *, stays: bool) -> None:
        """Keeps this side's socket, and the memory that holds the bytes."""
        self.end, self.arena, self.settings, self._stays = end, arena, settings, stays
        self.counts: dict[str, Any] = {}  # its work for these workers, as it was reported last
        self.run = 0  # run of the tickets: reports of an earlier one are of no use
        self.lent = True
        self._owner = os.getpid()
        self._messages = MessageSocket(end)
        _readers.add(self)

    @property
    def is_open(self) -> bool:
        """True if it has not been closed, and belongs to this process, not to its parent."""
        return self.process is not None and os.getpid() == self._owner

    @property
    def runs(self) -> bool:
        """True if the reader process still runs."""
        return self.process is not None and children.exit_code(self.process, self.process.sentinel) is None

    # --- what is sent to it -----------------------------------------------------------------------------------

    def new_run(self) -> None:
        """Cancels all that was wanted: the next message makes the process forget it."""
        self.run += 1

    def begin(self, begun: Begun) -> None:
        """Begins an epoch: what is wanted from now on is wanted by it."""
        self._send("begin", begun)

    def admit(self, end: int) -> None:
        """Notes that tickets below ``end`` are in the window."""
        self._send("admit", end)

    def send(self, outbox: Outbox) -> None:
        """Sends what ``outbox`` has collected, which it forgets. Never waits: what finds no room is sent later."""
        self._send("say", outbox.take())

    def _send(self, kind: str, what: Any) -> None:
        self._messages.put((kind, self.run, what))
        self._flush()

    def _flush(self) -> None:
        """Sends what is queued; what there is no room for is sent once the process has sent something."""
        with contextlib.suppress(OSError):  # it has ended, which ``receive`` finds out
            self._messages.flush()

    # --- what it tells ---------------------------------------------------------------------------------------

    def receive(self) -> list[Ready] | None:
        """Returns the tickets of this run whose bytes have arrived since the last call; None once the process has
        ended."""
        found = self._heard()
        return None if found is None else [each for some in found for each in some]

    def _heard(self) -> list[list[Ready]] | None:
        """Takes in what has come, and returns the tickets of each message of this run; None once the process has
        ended."""
        try:
            messages = self._messages.receive()
        except OSError:
            return None
        for _, _, counts in messages:
            self.counts |= counts
        self._flush()
        return [told for of, told, _ in messages if of == self.run]

    def silence(self) -> None:
        """Puts what is never readable in the place of the socket of a process that has ended.

        The end of a socket is readable for ever: whoever waits for it would never sleep again.
        """
        quiet = os.eventfd(0, os.EFD_CLOEXEC)
        os.dup2(quiet, self.end.fileno(), inheritable=False)
        os.close(quiet)

    def say_lost(self) -> None:
        """Logs that the process has ended, and what follows from it. Waits for its exit code, 10 s at most; does
        nothing once closed."""
        if self.process is None:
            return
        self.process.join(_LEAVE_S)
        LOGGER.warning(
            "The process that reads ahead (pid %d) has ended with %s. Workers read from storage themselves "
            "until workers are started anew; nothing is lost.",
            self.process.pid,
            children.in_words(children.exit_code(self.process, self.process.sentinel)),
        )

    # --- its end ---------------------------------------------------------------------------------------------

    def give_back(self) -> None:
        """Notes that the workers have ended: the process drops what it was to read, and waits for the next workers.

        ``counts`` are complete then. If it does not answer within 10 s, or does not stay, it is closed.
        """
        if not self.is_open:
            return
        if not self._stays:
            self.close()
            return
        self.new_run()
        self._send("end", None)
        until = monotonic() + _LEAVE_S
        while (found := self._heard()) == []:
            if not wait([self.end], max(0.0, until - monotonic())):
                break
        self.lent = False
        if not found:
            self.close()

    def close(self) -> None:
        """Ends the process (kills it after 10 s), and receives its last message. Idempotent, and of no effect after a
        fork."""
        if not self.is_open:
            return
        process, self.process = self.process, None
        self._forget_exit()
        with contextlib.suppress(OSError):
            self.end.shutdown(socket.SHUT_WR)
        process.join(_LEAVE_S)
        if children.exit_code(process, process.sentinel) is None:
            process.kill()
            process.join()
        children.close(process)
        self._heard()
        self.end.close()
        if self.fields is not None:
            self.fields.close()
        self.arena.close()


class ReaderOwner:
    """Owns the reader process of one loader, from the first workers on, and lends it to one set of workers at a
    time."""

    def __init__(self) -> None:
        self._reader: Reader | None = None
        self._pipeline: object = None  # pipeline whose fields the process keeps

    def borrow(self, pipeline: object, settings: ReaderSettings, make: Callable[..., Reader]) -> Reader:
        """Returns a reader process with these settings, to be given back: the last one, if it runs and had the same
        settings and pipeline, else one that ``make`` makes.

        While that is lent, others who borrow get one that keeps nothing in memory, and ends when it is given back.
        """
        reader = self._reader
        if reader is not None and reader.lent:
            return make(replace(settings, memory_bytes=0, keeps_fields=False), stays=False)
        same = reader is not None and reader.settings == settings and self._pipeline is pipeline
        if reader is not None and not (same and reader.runs):
            reader.close()
            reader = None
        if reader is None:
            reader = make(settings, stays=True)
            self._reader, self._pipeline = reader, pipeline
            finalize(self, reader.close)
        reader.lent, reader.counts = True, {}
        return reader


def arena_of(budget: int) -> Arena:
    """Makes the arena for ``budget`` bytes that are kept: twice that, as sizes that differ leave gaps, and what is read
    ahead.

    Memory is taken as it is written. Raises OSError where a limit of address space or file size leaves too little.
    """
    arena, least = Arena("fetched", round_up(2 * budget, LEAST) + MOST), 2 * budget
    if arena.capacity < least:
        arena.close()
        raise OSError(errno.ENOMEM, _TOO_LARGE.format(budget=budget, capacity=least))
    return arena


def _close_inherited_ends() -> None:
    """Closes, in a freshly forked process, what would keep a reader process from seeing that its loader has gone.

    Nor must it wait for that process as it ends. (Workers need the socket for fields.)
    """
    for reader in list(_readers):
        with contextlib.suppress(OSError):
            reader.end.close()
        multiprocessing.process._children.discard(reader.process)  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_close_inherited_ends)
