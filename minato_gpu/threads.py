"""The package's own threads, which anybody's last reference to a loader may die in, and how they wait."""

from __future__ import annotations

import os
import threading


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
    """How many cores this process may run on, which is what a container or ``taskset`` leaves of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
