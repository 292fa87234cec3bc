"""Workers' Python stacks: asked for when the loader has waited for longer than it should.

A worker process answers a signal: ``faulthandler`` writes the stacks of its threads to a socket, from within the
signal's handler, so that even a worker stuck in compiled code answers. Of thread workers the interpreter knows the
stacks. Nothing is asked while all goes well.

The same socket carries a worker process's last words: which exception ends it. All worker processes of a loader share
it; the kernel says who has written what (SCM_CREDENTIALS), and keeps apart what several have written.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections import defaultdict
from pathlib import Path
from time import monotonic

SIGNAL = signal.SIGRTMAX - 1  # one that neither Python nor PyTorch nor a usual data set uses
_FIRST_S = 0.5  # for the first line of a dump; a worker that the kernel holds never answers
_RUNS_S = 10.0  # the same of one that could run, and has no core on a busy machine
_NEXT_S = 0.25  # a dump that pauses for so long is over, as there is no end mark; but not if it has had no core
_LINE_S = 5e-3  # on a core, far more than the next line of a dump takes
_MOST = 1 << 16
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_LAST = b"\0"  # before last words; no stack has it


def offer(end: socket.socket) -> None:
    """Makes the signal write this worker process's stacks to ``end`` from now on."""
    end.setblocking(False)  # a dump that nobody reads must not hold the worker
    faulthandler.register(SIGNAL, file=end.fileno(), all_threads=True, chain=False)


def leave_word(end: socket.socket, error: BaseException) -> None:
    """Sends the name and traceback of the exception that ends this worker process."""
    text = "".join(traceback.format_exception(error)).encode("utf-8", "replace")
    with contextlib.suppress(OSError):  # nobody is there, or nobody reads
        end.sendall(_LAST + type(error).__name__.encode("utf-8", "replace") + _LAST + text[-_MOST:])


class Stacks:
    """The parent's end of the socket that worker processes write stacks and last words to."""

    def __init__(self, end: socket.socket) -> None:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        end.setblocking(False)
        self._end = end
        self._written: defaultdict[int, bytes] = defaultdict(bytes)  # what is not asked for yet, by process id

    def _read(self) -> None:
        """Takes in all that has been written."""
        with contextlib.suppress(BlockingIOError):
            while True:
                data, credentials, _, _ = self._end.recvmsg(_MOST, socket.CMSG_SPACE(_CREDENTIALS.size))
                if not data:
                    return
                pid, _, _ = _CREDENTIALS.unpack(credentials[0][2])
                self._written[pid] = (self._written[pid] + data)[-2 * _MOST :]

    def last_words(self, pid: int) -> tuple[str, str]:
        """Returns name and traceback of what ended a worker process; empty if no exception did."""
        self._read()
        _, name, text = (*self._written.pop(pid, b"").split(_LAST, 2), b"", b"")[:3]
        return name.decode("utf-8", "replace"), text.decode("utf-8", "replace").rstrip()

    def of_process(self, pid: int) -> str:
        """Returns the stacks of a worker process; empty if it does not answer."""
        if not _listens(pid):  # one that is still starting would be killed by the signal
            return ""
        self._read()
        self._written.pop(pid, None)  # what an earlier dump left
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SIGNAL)
        poll, out, wait, until, ran = select.poll(), b"", _FIRST_S, monotonic() + _RUNS_S, 0.0
        poll.register(self._end, select.POLLIN)
        while len(out) < _MOST:
            if not poll.poll(1e3 * wait):
                if monotonic() > until or (out and _ran_s(pid) >= ran + _LINE_S):
                    break
                if not _could_run(pid) and not poll.poll(0):  # it may have answered, and rest again, meanwhile
                    break
                continue
            self._read()
            data = self._written.pop(pid, b"")
            if data:
                out, wait, ran = out + data, _NEXT_S, _ran_s(pid)
        return out.decode("utf-8", "replace").rstrip()


def _could_run(pid: int) -> bool:
    """Returns whether the process waits for nothing but a core or the kernel: it has been woken by the signal."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] in (b"R", b"D")
    except OSError:
        return False


def _ran_s(pid: int) -> float:
    """Returns the seconds that the thread that answers has been on a core; infinite if the kernel does not tell."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_bytes().split()[0]) * 1e-9 or float("inf")
    except (OSError, IndexError):
        return float("inf")


def _listens(pid: int) -> bool:
    """Returns whether the process has a handler for the signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return False
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (SIGNAL - 1) & 1)


def of_thread(thread: threading.Thread) -> str:
    """Returns the stack of a worker thread; empty if it has ended."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "" if frame is None else "".join(traceback.format_stack(frame)).rstrip()


def told(stacks: dict[int, str]) -> str:
    """Returns stacks by worker, as the rest of an error's message."""
    return "".join(
        f"\nWorker {number} is at:\n{stack or '  (it does not answer)'}" for number, stack in sorted(stacks.items())
    )
