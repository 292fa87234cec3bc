"""Time on cores and time spent waiting for one: what a sample costs must not depend on who else was running."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from time import thread_time

_TASKS = Path("/proc/self/task")


class RunQueueDelay:
    """Measures for how many seconds its thread has been runnable without running (Linux's schedstat).

    Always 0.0 where the kernel does not tell. A reading takes about two microseconds.
    """

    def __init__(self) -> None:
        self._fd = _opened("/proc/thread-self/schedstat")

    def __call__(self) -> float:
        return 0.0 if self._fd < 0 else int(os.pread(self._fd, 64, 0).split()[1]) * 1e-9

    def close(self) -> None:
        """Closes the descriptor; idempotent."""
        _close(self._fd)
        self._fd = -1


class CoreTime:
    """Seconds that the calling thread and a library's threads have run: those named ``[LIBRARY]...`` in this process.

    A reading takes two microseconds for each thread, and ten times that where cores are busy. The caller's own seconds
    are those of its clock: what the kernel lists of a thread that runs may be a tick old. The library's threads must
    wait by then; their seconds do not count where the kernel does not tell them.
    """

    def __init__(self, library: str) -> None:
        self._prefix = f"[{library}]"
        self._threads: dict[str, int] = {}  # thread -> its schedstat, -1 where it is somebody else's

    def look(self) -> None:
        """Finds the threads that there are now; those that come later are not counted until the next call."""
        with contextlib.suppress(OSError):
            there = {path.name for path in _TASKS.iterdir()}
            for thread in there - self._threads.keys():
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    ours = (_TASKS / thread / "comm").read_text().startswith(self._prefix)
                    self._threads[thread] = _opened(_TASKS / thread / "schedstat") if ours else -1
            for thread in self._threads.keys() - there:
                _close(self._threads.pop(thread))

    def __call__(self) -> float:
        """Returns the seconds so far; less than before when a thread has ended."""
        total = 0
        for fd in self._threads.values():
            if fd >= 0:
                with contextlib.suppress(OSError):
                    total += int(os.pread(fd, 64, 0).split()[0])
        return thread_time() + total * 1e-9

    def close(self) -> None:
        """Closes all descriptors; idempotent."""
        for fd in self._threads.values():
            _close(fd)
        self._threads.clear()


def _opened(path: str | Path) -> int:
    """Returns an open descriptor; -1 if there is no such file."""
    with contextlib.suppress(OSError):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return -1


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
