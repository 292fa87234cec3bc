"""The package's own threads, which anybody's last reference to a loader may die in."""

from __future__ import annotations

import threading


class OwnThread(threading.Thread):
    """A thread of a loader's: it may hold a lock that closing a loader takes, and must wait for no other."""

    @staticmethod
    def is_current() -> bool:
        """Whether the caller runs in one."""
        return isinstance(threading.current_thread(), OwnThread)
