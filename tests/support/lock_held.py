"""How long a call stops all other threads: what it uses of a core while it holds the interpreter lock.

A thread counts beside it, and reads at each count how much CPU time the caller has used: between two counts the caller
had the lock. So it matters little what else the machine is busy with. No more than that: a call that holds the lock and
uses no core is not seen, and one that uses a core while the counting thread gets none looks as if it held the lock; the
least of several calls is what to go by.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class _Counting:
    """Counts until told to stop. ``longest``: CPU seconds of the thread that made it, between two counts."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.begun = threading.Event()
        self.stops = False
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self.thread = threading.Thread(target=self._count)

    def _count(self) -> None:
        self.begun.set()
        last = time.clock_gettime(self._clock)
        goes_on = True
        while goes_on:
            goes_on = not self.stops
            now = time.clock_gettime(self._clock)
            self.longest, last = max(self.longest, now - last), now


def longest_hold(act: Callable[[], object]) -> float:
    """The longest time, in CPU seconds of the calling thread, for which ``act`` lets no other thread run."""
    counting = _Counting()
    counting.thread.start()
    counting.begun.wait()
    try:
        act()
    finally:
        counting.stops = True
        counting.thread.join()
    return counting.longest


def least_hold(act: Callable[[], object], calls: int = 7) -> float:
    """The least of several calls."""
    return min(longest_hold(act) for _ in range(calls))
