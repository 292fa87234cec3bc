"""The package's own threads, which anybody's last reference to a loader may die in, and how they wait."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

_UNLIMITED = 1 << 20  # cores


class OwnThread(threading.Thread):
    """A thread of a loader's: it may hold a lock that closing a loader takes, and must wait for no other."""

    @staticmethod
    def is_current() -> bool:
        """Whether the caller runs in one."""
        return isinstance(threading.current_thread(), OwnThread)


def await_event(fd: int) -> None:
    """Wait until somebody has written to an event descriptor, and make it unreadable again.

    The kernel may hand any thread a signal that Python handles, SIGCHLD say. os.read then goes on waiting (PEP 475),
    where os.eventfd_read raises InterruptedError.
    """
    os.read(fd, 8)


def usable_cores() -> int:
    """How many cores this process may use: those that it may run on, or fewer where a container has a quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, _quota()))


def _quota(mount: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores' worth of time, rounded up, that the process's control group (version 2) and those above it leave it."""
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
