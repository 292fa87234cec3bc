"""Child processes of this process: whether they have ended, also where other code has reaped them (waited for them).

A child's exit code goes to whoever waits for it first, which may be other code: the kernel where SIGCHLD is ignored
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
"""The exit code given for a process that other code has reaped. No process can end with it."""
# longest wait for an ended process's exit code: a fork server sends it only after the process's pipes have closed
_EXIT_CODE_WAIT_S = 1.0


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
    """Returns the exit code; UNKNOWN if other code has reaped the process; None while it runs.

    ``end`` is its pidfd (``descriptor``) or, where there is none, ``process.sentinel``: readable once it has ended.
    """
    if wait([end], 0.0):
        _mark_ended(process)
    elif end != process.sentinel:
        # it runs; do not ask multiprocessing, which reports the children of a killed fork server as ended
        return None
    return process.exitcode


def kill(process: BaseProcess) -> None:
    """Kills a process, even if multiprocessing believes that it has ended; does nothing if it has."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)


def close(process: BaseProcess) -> None:
    """Releases a process that has ended."""
    _mark_ended(process)
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
    # a process that multiprocessing started waits for its own children before atexit functions run: finalizers run
    # earlier
    in_child = Finalize(None, close, exitpriority=0)

    def forget() -> None:
        atexit.unregister(close)
        in_child.cancel()

    return forget


def _mark_ended(process: BaseProcess) -> None:
    """Tells multiprocessing that the process has ended.

    Otherwise Process.close() would fail, and at exit it would signal a pid that may have been reused.
    """
    if process.exitcode is None:
        process.join(_EXIT_CODE_WAIT_S)
    if process.exitcode is None:
        process._popen.returncode = UNKNOWN  # type: ignore[attr-defined]
