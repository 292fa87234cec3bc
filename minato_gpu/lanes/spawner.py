"""The process that forks replacements of dead workers: a copy of the parent as it was before it had threads.

It has one thread and waits: for requests of the parent, and for the ends of the workers that it forked, which only it
can collect. It tells both through a socket, a process with a descriptor that stands for it, so that a signal never
reaches another that got the same id. It ends, and its workers with it, when the socket closes or the parent has ended.

If it is killed itself, its workers end with it, and the next worker's death is an error. Rejected: a spare that takes
its place.
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
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from minato_gpu.lanes import forking
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.util import children
from minato_gpu.util.messages import LOGGER

LOST = "the process that starts replacements has been killed"
_NEEDS = (
    "on_worker_death='replace' needs pidfd_open to fork replacements: Linux has it since 5.3, and this system lacks or "
    "refuses it (as containers of an older Docker do). With multiprocessing_context='spawn' it goes without."
)
_LARGEST = 1 << 16

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

    def join(self) -> None:
        """Waits for its end."""
        readable(self.sentinel, None)

    def close(self) -> None:
        """Closes the descriptor, once it has ended."""
        os.close(self.sentinel)


class Spawner:
    """The parent's side. ``start`` runs in the spawner: it forks a worker of this number, which waits to be known.

    A worker is told which blocks its predecessor has stored that are in use.
    """

    def __init__(self, context: Context, links: WorkerChannels, start: Start) -> None:
        """Raises RuntimeError where the system has no descriptors of processes."""
        self._links = links
        self._workers: dict[int, Adopted] = {}  # those that have not ended, by process id
        self._asked: set[int] = set()  # numbers, until it is answered
        self._closing = False
        parent = children.descriptor(os.getpid())
        if parent is None:
            raise RuntimeError(_NEEDS)
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        links.late_ends.append(self._end)
        self._process = context.Process(
            target=_main, args=(theirs, links, start, parent), daemon=False, name="minato-spawner"
        )
        forking.start(self._process)
        theirs.close()
        os.close(parent)

    def fileno(self) -> int:
        """Returns a descriptor that is readable when there is news; -1 once the process is gone."""
        return self._end.fileno()

    def request(self, number: int, blocks: Blocks) -> None:
        """Asks for a worker to be forked. If the process is gone, ``news`` says so."""
        self._asked.add(number)
        with os.fdopen(os.memfd_create("minato-blocks"), "wb", buffering=0) as file:  # too many for a message
            file.write(pickle.dumps(list(blocks)))
            _tell(self._end, number, file.fileno())

    def news(self) -> list[tuple[int, Adopted | Exception]]:
        """Returns workers that were forked since the last call, or why one was not."""
        found: list[tuple[int, Adopted | Exception]] = []
        while self.fileno() >= 0 and readable(self.fileno(), 0.0):
            found += self._receive()
        if self.fileno() < 0:
            found += [(number, RuntimeError(LOST)) for number in self._asked]
            self._asked.clear()
        return found

    def _receive(self) -> list[tuple[int, Adopted | Exception]]:
        message, fds = _heard(self._end)
        if message is None:
            self._lose()
            return []
        what, number, told = message
        if what == "ended":
            if number in self._workers:  # or its descriptor was lost
                self._workers.pop(number).code = told
            return []
        self._asked.remove(number)
        if not fds:
            return [(number, RuntimeError(told if what == "failed" else os.strerror(errno.EMFILE)))]
        self._workers[told] = Adopted(told, fds[0])
        return [(number, self._workers[told])]

    def _lose(self) -> None:
        """Handles the end of the process, and of its workers with it."""
        self._links.late_ends.remove(self._end)
        self._end.close()
        for worker in self._workers.values():
            worker.code = -signal.SIGKILL
        self._process.join()
        if not self._closing:
            LOGGER.warning("The process that starts replacements of workers (pid %d) has ended.", self._process.pid)

    def close(self) -> list[Adopted]:
        """Ends the process and all workers that it has forked, and waits for that. Returns those of the workers that
        ``news`` has not told of; the caller closes them."""
        self._closing = True
        late: list[tuple[int, Adopted | Exception]] = []
        if self.fileno() >= 0:
            self._end.shutdown(socket.SHUT_WR)
        while self.fileno() >= 0:
            readable(self.fileno(), None)
            late += self.news()
        children.close(self._process)
        return [process for _, process in late if isinstance(process, Adopted)]


def readable(fd: int, timeout: float | None) -> bool:
    """Returns whether the descriptor is readable, or becomes so within ``timeout`` seconds (None: waits for that)."""
    return bool(_ready([fd], timeout))


def _ready(fds: Iterable[int], timeout: float | None = None) -> list[int]:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(None if timeout is None else max(0.0, 1e3 * timeout))]


def _tell(end: socket.socket, what: object, *fds: int) -> None:
    with contextlib.suppress(OSError):  # the other has closed
        socket.send_fds(end, [pickle.dumps(what)], list(fds))


def _heard(end: socket.socket) -> tuple[Any, list[int]]:
    """Returns the next message of the other side, and the descriptors that came with it.

    The message is None once the other side has closed: at once, if it had not read all that was sent to it.
    """
    try:
        data, fds, _, _ = socket.recv_fds(end, _LARGEST, 1)
    except OSError:
        return None, []
    return pickle.loads(data) if data else None, fds


# --- in a spawner -------------------------------------------------------------------------------------------------


def _main(*arguments: Any) -> None:
    """Runs the spawner, without what multiprocessing does at a process's end."""
    try:
        _serve(*arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _serve(end: socket.socket, links: WorkerChannels, start: Start, parent: int) -> None:
    """Serves requests. ``parent``: a descriptor of the process that all this is for."""
    forking.begin()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    links.late_ends.append(end)  # what is forked from here closes it
    workers: dict[int, BaseProcess] = {}  # workers by descriptor
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
            workers |= _forked(end, start, number, fds)


def _forked(end: socket.socket, start: Start, number: int, fds: list[int]) -> dict[int, BaseProcess]:
    """Forks a worker of this number, if that is possible, and tells the parent. ``fds``: the file of blocks.

    Returns the worker by its descriptor; empty if it could not be forked.
    """
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
