"""Copies that are under way, and what they read, which is kept until the device is through with them.

Of a load that had to be put back, the copies of the first attempt may be under way when it is issued anew or given up.
So each attempt is kept by itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque

from minato_gpu.memory.accelerator import Event


class InFlightCopies:
    """The copies that have been issued on one stream, oldest first. Every method may be called by any thread."""

    def __init__(self) -> None:
        self._copies: deque[tuple[Event | None, list[object]]] = deque()
        self._sweeping = threading.Lock()

    def add(self, event: Event | None, keep: list[object]) -> None:
        """All or a part of a load has been issued; without an event nobody uses what was copied."""
        self._copies.append((event, keep))

    def sweep(self) -> None:
        """Let go of what copies that are through have read; never waits."""
        over: list[object] = []  # dropped without the lock: it may run code of others
        with self._sweeping:
            while self._copies and _through(self._copies[0][0]):
                over.append(self._copies.popleft())

    def wait(self) -> None:
        """Until the device is through with all of them, or says what is wrong with it: it reads no more then, and who
        issues or takes the next batch is told."""
        for event, _ in list(self._copies):
            if event is not None:
                with contextlib.suppress(Exception):
                    event.synchronize()

    def close(self) -> None:
        """Wait, then let go of everything."""
        self.wait()
        with self._sweeping:
            over, self._copies = self._copies, deque()
        over.clear()


def _through(event: Event | None) -> bool:
    """Whether the event has come to pass. Where it cannot be asked, what the copies read is kept: the device's error
    may be another's, and who issues or takes the next batch is told of it."""
    try:
        return event is None or event.query()
    except Exception:
        return False
