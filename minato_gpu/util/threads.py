"""The package's own threads, in which the last reference to a loader may die, and how they wait."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

_UNLIMITED = 1 << 20  # cores


class OwnThread(threading.Thread):
    """A thread of a loader.

    It may hold a lock that closing a loader takes, so it must wait for no other such thread.
    """

    @staticmethod
    def is_current() -> bool:
        """Returns whether the caller runs in such a thread."""
        return isinstance(threading.current_thread(), OwnThread)


def await_event(fd: int) -> None:
    """Waits until an event descriptor has been written to, and resets it.

    The kernel may hand any thread a signal that Python handles, such as SIGCHLD. os.read then goes on waiting (PEP
    475), where os.eventfd_read raises InterruptedError.
    """
    os.read(fd, 8)


def usable_cores() -> int:
    """Returns how many cores this process may use: its CPU affinity, or fewer if a control group (version 2) has a
    quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, _quota()))


def _quota(mount: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the least quota of the process's control group (version 2) and those above it, in cores, rounded up;
    ``_UNLIMITED`` if none has one."""
    try:
        own = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return _UNLIMITED
    group = Path(own.lstrip("/"))
    limits = [_UNLIMITED]
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError):
            quota, period = (mount / folder / "cpu.max").read_text().split()
            if quota != "max":
                limits.append(-(-int(quota) // int(period)))
    return min(limits)
