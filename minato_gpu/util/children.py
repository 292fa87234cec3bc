"""Child processes of this process: whether they have ended, and with which exit code, whoever collects that.

A child's exit code goes to whoever waits for it first, which may be somebody else: the kernel where SIGCHLD is ignored
(which a program inherits), a handler or thread that waits for any child, or multiprocessing itself as another thread
starts a process. For multiprocessing such a child runs for ever; so ends are seen by descriptors (pidfd) here.
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
    """Returns a descriptor that is readable once the process has ended.

    None where the system has none: Linux before 5.3, and sandboxes that do not know pidfd_open, such as containers of
    an older Docker. Raises any other OSError.
    """
    try:
        return os.pidfd_open(pid)
    except AttributeError:
        return None
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS):
            return None
        raise


def exit_code(process: BaseProcess, end: int) -> int | None:
    """Returns the process's exit code; None while it runs.

    ``end`` is a descriptor that is readable once it has ended.
    """
    if wait([end], 0.0):
        _settle(process)
    elif end != process.sentinel:
        return None  # multiprocessing takes those of a fork server that was killed for dead
    return process.exitcode


def kill(process: BaseProcess) -> None:
    """Kills a process that runs, even if multiprocessing believes that it has ended."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)


def close(process: BaseProcess) -> None:
    """Releases a process that has ended."""
    _settle(process)
    process.close()


def in_words(code: int | None) -> str:
    """Returns an exit code in words, for a message."""
    if code != UNKNOWN:
        return f"exit code {code}"
    return "an exit code that is not known, as something else has collected the process (is SIGCHLD ignored?)"


def closed_at_exit(close: Callable[[], object]) -> Callable[[], None]:
    """Has ``close`` called as Python ends, before multiprocessing waits for its children.

    Returns a function that undoes this.
    """
    atexit.register(close)
    in_child = Finalize(None, close, exitpriority=0)  # what multiprocessing starts waits for its children first

    def forget() -> None:
        atexit.unregister(close)
        in_child.cancel()

    return forget


def _settle(process: BaseProcess) -> None:
    """Tells multiprocessing that the process has ended.

    Otherwise it would not close the process, and at its own end would signal an id that may be another process's by
    then.
    """
    if process.exitcode is None:
        process.join(_SAID_S)
    if process.exitcode is None:
        process._popen.returncode = UNKNOWN  # type: ignore[attr-defined]
