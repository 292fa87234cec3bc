"""How long this thread has waited for a core: what a sample costs must not depend on who else was running."""

from __future__ import annotations

import contextlib
import os


class RunQueueDelay:
    """Seconds that the thread that made this has been runnable without running (Linux's schedstat).

    Always 0.0 where the kernel does not tell. A reading takes about two microseconds.
    """

    def __init__(self) -> None:
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def __call__(self) -> float:
        if self._fd < 0:
            return 0.0
        return int(os.pread(self._fd, 64, 0).split()[1]) * 1e-9

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
