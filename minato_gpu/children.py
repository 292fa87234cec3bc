"""Processes that this one has started: whether they have ended and with what code, whoever collects them.

A child's exit code is for whoever waits for it first, and that may be somebody else: the kernel where SIGCHLD is
ignored (which a program inherits), a handler or a thread that waits for any child, multiprocessing itself as another
thread starts a process. To multiprocessing such a child runs for ever. Here it has ended once the descriptor that
stands for its end says so. A fork server, too, may be killed before the processes that it has started.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize

UNKNOWN = 256
"""The exit code of a process that somebody else has collected: one that none can have."""
_SAID_S = 1.0  # until it is known that it has ended: a fork server says with which code; its pipes close before that


def descriptor(pid: int) -> int | None:
    """A descriptor that is readable once this process has ended. None where the system gives none: Linux before 5.3,
    and sandboxes that do not know of pidfd_open, as containers of an older Docker. Raises what else is in the way."""
    try:
        return os.pidfd_open(pid)
    except AttributeError:
        return None
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS):
            return None
        raise


def exit_code(process: BaseProcess, end: int) -> int | None:
    """None while it runs. ``end``: a descriptor that is readable once it has ended."""
    if wait([end], 0.0):
        _settle(process)
    elif end != process.sentinel:
        return None  # multiprocessing takes those of a fork server that was killed for dead
    return process.exitcode


def kill(process: BaseProcess) -> None:
    """End one that runs, even where multiprocessing takes it for dead."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)


def close(process: BaseProcess) -> None:
    """Let go of a process that has ended."""
    _settle(process)
    process.close()


def in_words(code: int | None) -> str:
    """An exit code, for a message."""
    if code != UNKNOWN:
        return f"exit code {code}"
    return "an exit code that is not known, as something else has collected the process (is SIGCHLD ignored?)"


def closed_at_exit(close: Callable[[], object]) -> Callable[[], None]:
    """Have ``close`` called as Python ends, before multiprocessing waits for its children (what was registered last
    runs first). Returns what makes it forget that."""
    atexit.register(close)
    in_child = Finalize(None, close, exitpriority=0)  # what multiprocessing starts waits for its children first

    def forget() -> None:
        atexit.unregister(close)
        in_child.cancel()

    return forget


def _settle(process: BaseProcess) -> None:
    """Have multiprocessing know that it has ended. It would not close it, and signal it as this process ends, by an id
    that may be another's by then."""
    if process.exitcode is None:
        process.join(_SAID_S)
    if process.exitcode is None:
        process._popen.returncode = UNKNOWN  # type: ignore[attr-defined]
