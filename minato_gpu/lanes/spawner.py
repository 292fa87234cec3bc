"""The processes that fork replacements of dead workers: copies of the parent as it was before it had threads.

There are two, as anything may be killed: one forks workers, the other is its spare. When one is gone the other takes
its place, and forks a new spare. So what is left to fear is that both are killed before either is replaced: the next
worker's death is an error then. A worker ends with the process that forked it, and is replaced in its turn.

Each has one thread and waits: for requests of the parent, and for the ends of the workers that it forked, which only it
can collect. It tells both through a socket, a process with a descriptor that stands for it, so that a signal never
reaches another that got the same id. It ends, and its workers with it, when the socket closes or the parent has ended.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import select
import signal
import socket
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

from minato_gpu.lanes import forking
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.util import children
from minato_gpu.util.messages import LOGGER

LOST = "both processes that start replacements have been killed"
_NEEDS = (
    "on_worker_death='replace' needs pidfd_open to fork replacements: Linux has it since 5.3, and this system lacks or "
    "refuses it (as containers of an older Docker do). With multiprocessing_context='spawn' it goes without."
)
_LARGEST = 1 << 16
_A_SPARE = -1  # is asked for, in the place of a worker's number

Blocks = Sequence[tuple[int, int]]
"""Offset and bytes of what is stored in a worker's arena."""
Start = Callable[[int, Blocks], BaseProcess]

Context = Any
"""multiprocessing, torch's, or one of their contexts: what they share has no type there."""


@dataclass(eq=False)
class Adopted:
    """A worker that a spawner forked, as its parent's parent sees it: the part of a ``BaseProcess`` that is needed."""

    pid: int
    sentinel: int  # a process descriptor, readable once it has ended
    code: int | None = None  # None until the spawner tells; where that is not there to tell, it was killed as well

    @property
    def exitcode(self) -> int | None:
        """The exit code; None while it runs."""
        return self.code if readable(self.sentinel, 0.0) else None

    def kill(self) -> None:
        """Kills it."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.sentinel, signal.SIGKILL)

    def close(self) -> None:
        """Closes the descriptor."""
        _let_go(self.sentinel)


@dataclass(eq=False)
class _Side:
    """One of the two spawner processes, as the parent sees it.

    ``sentinel`` is there once the process has said that it runs. ``workers``: those that it has forked and that have
    not ended, by process id.
    """

    end: socket.socket
    pid: int = -1
    sentinel: int = -1
    workers: dict[int, Adopted] = field(default_factory=dict)


class Spawner:
    """The parent's side. ``start`` runs in a spawner: it forks a worker of this number, which waits to be known.

    A worker is told which blocks its predecessor has stored that are in use.
    """

    def __init__(self, context: Context, links: WorkerChannels, start: Start) -> None:
        """Raises RuntimeError where the system has no descriptors of processes."""
        self._links = links
        self._watch = select.epoll()
        self._sides: list[_Side] = []  # the first is asked for workers
        self._asked: dict[int, Blocks] = {}  # blocks of the predecessor by number, until it is answered
        self._closing = False
        theirs, parent = self._connect(), children.descriptor(os.getpid())
        if parent is None:
            theirs.close()
            raise RuntimeError(_NEEDS)
        self._process = context.Process(
            target=_main, args=(theirs, context, links, start, parent), daemon=False, name="minato-spawner"
        )
        forking.start(self._process)
        theirs.close()
        os.close(parent)

    def fileno(self) -> int:
        """Returns a descriptor that is readable when there is news."""
        return self._watch.fileno()

    def request(self, number: int, blocks: Blocks) -> None:
        """Asks for a worker to be forked."""
        self._asked[number] = blocks
        self._have_spare()  # the last one could not be forked, if there is none
        self._ask_for_worker(number)

    def _ask_for_worker(self, number: int) -> None:
        with os.fdopen(os.memfd_create("minato-blocks"), "wb", buffering=0) as file:  # too many for a message
            file.write(pickle.dumps(list(self._asked[number])))
            self._ask(number, file.fileno())

    def news(self) -> list[tuple[int, Adopted | Exception]]:
        """Returns workers that were forked since the last call, or why one was not."""
        found: list[tuple[int, Adopted | Exception]] = []
        while ready := {fd for fd, _ in self._watch.poll(0)}:
            told = [self._receive(side) for side in list(self._sides) if side.end.fileno() in ready]
            found += [worker for worker in told if worker is not None]
        if not self._sides:
            found += [(number, RuntimeError(LOST)) for number in self._asked]
            self._asked.clear()
        return found

    def _receive(self, side: _Side) -> tuple[int, Adopted | Exception] | None:
        message, fds = _heard(side.end)
        if message is None or (message[0] == "runs" and not fds):  # whose end nobody would see
            self._lose(side)
            return None
        what, number, told = message
        if what == "runs":
            side.pid, side.sentinel = told, fds[0]
            self._have_spare()
            return None
        if what == "ended":
            if number in side.workers:  # or its descriptor was lost
                side.workers.pop(number).code = told
            return None
        del self._asked[number]
        if not fds:
            return number, RuntimeError(told if what == "failed" else os.strerror(errno.EMFILE))
        side.workers[told] = Adopted(told, fds[0])
        return number, side.workers[told]

    def _lose(self, side: _Side) -> None:
        """Handles the end of a side: the other goes on.

        One that never ran could not be forked, which is not tried again at once.
        """
        first = side is self._sides[0]
        self._sides.remove(side)
        self._links.late_ends.remove(side.end)
        side.end.close()
        for worker in side.workers.values():
            worker.code = -signal.SIGKILL
        if side.sentinel >= 0:
            if side.pid == self._process.pid:
                self._process.join()
            readable(side.sentinel, None)
            _let_go(side.sentinel)
            if not self._closing:
                LOGGER.warning("A process that starts replacements of workers (pid %d) has been killed.", side.pid)
            self._have_spare()
        if first:
            for number in self._asked:
                self._ask_for_worker(number)

    def _connect(self) -> socket.socket:
        """Makes a new side; returns the socket of the process that will be it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._links.late_ends.append(ours)
        self._watch.register(ours, select.EPOLLIN)
        self._sides.append(_Side(ours))
        return theirs

    def _have_spare(self) -> None:
        """Has a spare forked if there is none."""
        if len(self._sides) == 1 and self._sides[0].pid >= 0 and not self._closing:
            with self._connect() as theirs:
                self._ask(_A_SPARE, theirs.fileno())

    def _ask(self, what: int, *fds: int) -> None:
        if self._sides:
            _tell(self._sides[0].end, what, *fds)  # if it has ended, ``news`` finds that out

    def close(self) -> list[Adopted]:
        """Ends both sides, and with them what they still fork; returns workers that had been asked for meanwhile."""
        self._closing = True
        for side in self._sides:
            side.end.shutdown(socket.SHUT_WR)
        late = []
        while self._sides:
            readable(self.fileno(), None)
            late += [process for _, process in self.news() if isinstance(process, Adopted)]
        self._process.join()
        children.close(self._process)
        self._watch.close()
        return late


def readable(fd: int, timeout: float | None) -> bool:
    """Returns whether the descriptor is readable, or becomes so within ``timeout`` seconds (None: waits for that)."""
    return bool(_ready([fd], timeout))


def _ready(fds: Iterable[int], timeout: float | None = None) -> list[int]:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(None if timeout is None else max(0.0, 1e3 * timeout))]


def _let_go(process: int) -> None:
    """Closes the descriptor of a process that has ended.

    What was forked by another that has been killed is a child of this process where that is the first of its container.
    """
    with contextlib.suppress(OSError):  # mostly it is not
        os.waitid(os.P_PIDFD, process, os.WEXITED | os.WNOHANG)
    os.close(process)


def _tell(end: socket.socket, what: object, *fds: int) -> None:
    with contextlib.suppress(OSError):  # the other has closed
        socket.send_fds(end, [pickle.dumps(what)], list(fds))


def _heard(end: socket.socket) -> tuple[Any, list[int]]:
    """Returns what the other side sends, with its descriptors; None if it has closed, even with news unread."""
    try:
        data, fds, _, _ = socket.recv_fds(end, _LARGEST, 1)
    except OSError:
        return None, []
    return pickle.loads(data) if data else None, fds


# --- in a spawner -------------------------------------------------------------------------------------------------


def _main(*arguments: Any) -> None:
    """Runs a spawner, without what multiprocessing does at a process's end, which is to wait for a spare, say."""
    try:
        _serve(*arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _serve(end: socket.socket, context: Context, links: WorkerChannels, start: Start, parent: int) -> None:
    """Serves requests. ``parent``: a descriptor of the process that all this is for."""
    forking.begin()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    links.late_ends.append(end)  # what is forked from here closes it
    workers: dict[int, BaseProcess] = {}  # workers by descriptor
    _tell(end, ("runs", -1, os.getpid()), os.pidfd_open(os.getpid()))
    while True:
        for fd in _ready([end.fileno(), parent, *workers]):
            if fd in workers:
                process = workers.pop(fd)
                process.join()
                _tell(end, ("ended", process.pid, process.exitcode))
                process.close()
                os.close(fd)
                continue
            number, fds = (None, []) if fd == parent else _heard(end)
            if number is None:
                for process in workers.values():
                    process.kill()
                    process.join()
                return
            if number == _A_SPARE:
                _fork_spare(context, socket.socket(fileno=fds[0]), links, start, parent)
            else:
                workers |= _forked(end, start, number, fds)


def _fork_spare(context: Context, end: socket.socket, links: WorkerChannels, start: Start, parent: int) -> None:
    """Forks a spare; one that cannot be forked closes its end."""
    spare = context.Process(target=_main, args=(end, context, links, start, parent), daemon=False)
    with end, contextlib.suppress(OSError):
        forking.start(spare)


def _forked(end: socket.socket, start: Start, number: int, fds: list[int]) -> dict[int, BaseProcess]:
    """Forks a worker of this number, if that is possible, and tells the parent. ``fds``: the file of blocks."""
    try:
        with os.fdopen(fds[0], "rb") as file:
            file.seek(0)
            blocks = pickle.load(file)
        process = start(number, blocks)
    except Exception as error:
        _tell(end, ("failed", number, f"{type(error).__name__}: {error}"))
        return {}
    assert process.pid is not None
    descriptor = os.pidfd_open(process.pid)
    _tell(end, ("started", number, process.pid), descriptor)
    return {descriptor: process}
