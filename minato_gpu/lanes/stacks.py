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
from collections.abc import Iterable
from pathlib import Path
from time import monotonic

SIGNAL = signal.SIGRTMAX - 1  # one that neither Python nor PyTorch nor a usual data set uses
_ANSWER_S = 5.0  # longest wait for all answers; a worker that the kernel holds never answers
_NEXT_S = 0.5  # dumps that pause for so long are over, as there is no end mark
_MOST = 1 << 16
_ROOM = struct.pack("ll", 0, 4000)  # longest wait for room in the socket, as a timeval: seconds, microseconds
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_LAST = b"\0"  # before last words; no stack has it


def offer(end: socket.socket) -> None:
    """Makes the signal write this worker process's stacks to ``end`` from now on."""
    # A dump is many small writes: each waits for room, and not for long, as nobody may read them.
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _ROOM)
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
        """Returns the name and traceback of what ended a worker process, once; after that, and if no exception did, two
        empty strings."""
        self._read()
        _, name, text = (*self._written.pop(pid, b"").split(_LAST, 2), b"", b"")[:3]
        return name.decode("utf-8", "replace"), text.decode("utf-8", "replace").rstrip()

    def of_processes(self, pids: Iterable[int]) -> dict[int, str]:
        """Asks worker processes for their stacks, and returns these by process id; empty of those that do not answer.

        Waits up to ``_ANSWER_S`` seconds.
        """
        self._read()
        asked = [pid for pid in pids if _listens(pid)]  # one that is still starting would be killed by the signal
        for pid in asked:
            self._written.pop(pid, None)  # what an earlier dump left
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, SIGNAL)
        poll, until = select.poll(), monotonic() + _ANSWER_S
        poll.register(self._end, select.POLLIN)
        while (left := until - monotonic()) > 0:
            if poll.poll(1e3 * left if any(not self._written[pid] for pid in asked) else 1e3 * _NEXT_S):
                self._read()
            else:
                break
        return {pid: self._written.pop(pid, b"").decode("utf-8", "replace").rstrip() for pid in pids}


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
    """Returns stacks, by worker's number (not by process id), as text that goes on an error's message."""
    return "".join(
        f"\nWorker {number} is at:\n{stack or '  (it does not answer)'}" for number, stack in sorted(stacks.items())
    )
