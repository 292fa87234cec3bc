"""The process that forks replacements of dead workers: a copy of the parent as it was before it had threads.

It has one thread and waits: for requests of the parent, and for the ends of the workers that it forked, which only it
can collect. It tells both through a socket, a new worker's with a descriptor that stands for the process, so that a
signal never reaches another process that got the same id. It ends when the socket closes, and its workers with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import select
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minato_gpu.lanes.links import Links, close_inherited_ends

LOST = "the process that starts replacements has been killed"
_LARGEST = 1 << 16
_PR_SET_PDEATHSIG = 1
Start = Callable[[int, Sequence[tuple[int, int]]], Any]


class Adopted:
    """A worker that the spawner forked, as its parent's parent sees it: the part of a ``Process`` that is needed."""

    def __init__(self, pid: int, sentinel: int, spawner: Spawner) -> None:
        self.pid = pid
        self.sentinel = sentinel  # a process descriptor, readable once it has ended
        self._spawner = spawner
        self._code: int | None = None

    @property
    def exitcode(self) -> int | None:
        """None while it runs. Where the spawner is not there to tell, it was killed as the spawner was."""
        if self._code is None and readable(self.sentinel, 0.0):
            self._code = self._spawner.code_of(self.pid)
        return self._code

    def terminate(self) -> None:
        """Ask it to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.sentinel, number)

    def close(self) -> None:
        """Let go of the descriptor."""
        os.close(self.sentinel)


class Spawner:
    """The parent's side. ``start`` runs in the spawner: it forks a worker of this number, whose arena holds blocks."""

    def __init__(self, context: Any, links: Links, start: Start) -> None:
        self._links = links
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        links.late_ends.append(self._ours)
        self._offsets: dict[int, int] = {}  # by number: where its blocks are written down
        self._codes: dict[int, int] = {}
        self.gone = False
        by_kernel = threading.current_thread() is threading.main_thread()
        arguments = (theirs, links, start, os.getpid() if by_kernel else 0)
        self._process = context.Process(target=_main, args=arguments, daemon=False, name="minato-spawner")
        self._process.start()
        theirs.close()

    def fileno(self) -> int:
        """Readable when there is news."""
        return self._ours.fileno()

    def request(self, number: int, blocks: Sequence[tuple[int, int]]) -> None:
        """Have a worker forked."""
        listed = np.array(blocks, np.int64).reshape(-1, 2)
        arena = self._links.engine_arena
        offset = self._offsets[number] = arena.allocate(listed.nbytes)
        arena.buffer[offset : offset + listed.nbytes] = listed.tobytes()
        with contextlib.suppress(OSError):  # it has ended: ``news`` says so
            self._ours.send(pickle.dumps((number, offset, len(listed))))

    def news(self) -> list[tuple[int, Adopted | Exception]]:
        """Workers that were forked since the last call, or why one was not."""
        found: list[tuple[int, Adopted | Exception]] = []
        while not self.gone and readable(self._ours.fileno(), 0.0):
            try:
                data, fds, _, _ = socket.recv_fds(self._ours, _LARGEST, 1)
            except OSError:
                data, fds = b"", []
            if not data:
                self.gone = True
                found += [(number, RuntimeError(LOST)) for number in self._offsets]
                self._free(*self._offsets)
                break
            what, *told = pickle.loads(data)
            if what == "ended":
                self._codes[told[0]] = told[1]
            else:
                self._free(told[0])
                found.append((told[0], Adopted(told[1], fds[0], self) if fds else RuntimeError(told[1])))
        return found

    def lost(self) -> bool:
        """Whether it has ended."""
        return self.gone

    def _free(self, *numbers: int) -> None:
        for number in numbers:
            self._links.engine_arena.free(self._offsets.pop(number))

    def code_of(self, pid: int) -> int | None:
        """The exit code of a worker that has ended; None until it is known."""
        return self._codes.pop(pid, -signal.SIGKILL if self.gone else None)

    @property
    def exitcode(self) -> int | None:
        """None while it runs."""
        code: int | None = self._process.exitcode
        return code

    def close(self) -> list[Adopted]:
        """End the spawner, and with it what it still forks; returns workers that had been asked for meanwhile."""
        late = [process for _, process in self.news() if isinstance(process, Adopted)]
        self._free(*self._offsets)
        self._ours.close()
        self._process.join()
        self._process.close()
        return late


def readable(fd: int, timeout: float | None) -> bool:
    """Whether the descriptor is, or becomes so within ``timeout`` seconds (None: wait for that)."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout is None else max(0.0, 1e3 * timeout)))


# --- in the spawner -----------------------------------------------------------------------------------------------


def _main(end: socket.socket, links: Links, start: Start, parent: int) -> None:
    gc.freeze()  # what was inherited stays shared with the parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    if parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
    close_inherited_ends()
    links.late_ends.append(end)  # a worker forked from here closes it
    workers: dict[int, Any] = {}  # by descriptor
    poll = select.poll()
    poll.register(end, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd != end.fileno():
                poll.unregister(fd)
                process = workers.pop(fd)
                process.join()
                _tell(end, ("ended", process.pid, process.exitcode))
                process.close()
                os.close(fd)
                continue
            try:
                data = end.recv(_LARGEST)
            except ConnectionError:  # the parent has closed with news unread
                data = b""
            if not data:
                for process in workers.values():
                    process.kill()
                    process.join()
                return
            number, offset, count = pickle.loads(data)
            blocks = np.ndarray((count, 2), np.int64, links.engine_arena.buffer, offset).tolist()
            try:
                process = start(number, [(at, nbytes) for at, nbytes in blocks])
            except Exception as error:
                _tell(end, ("failed", number, f"{type(error).__name__}: {error}"))
                continue
            descriptor = os.pidfd_open(process.pid)
            workers[descriptor] = process
            poll.register(descriptor, select.POLLIN)
            _tell(end, ("started", number, process.pid), descriptor)


def _tell(end: socket.socket, what: tuple[Any, ...], *fds: int) -> None:
    with contextlib.suppress(OSError):  # the parent has closed
        socket.send_fds(end, [pickle.dumps(what)], list(fds))
