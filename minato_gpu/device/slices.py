"""Long work of a background thread in Python, cut into slices between which other threads may have the interpreter.

A thread keeps the interpreter's lock until it waits for something, or for five milliseconds where another thread asks
for it. Work on a micro-batch of 64 samples, or to gather a batch, takes one or two in one go, in which the training
loop stands still.

Decision: to let go has a price, five milliseconds where the other thread computes in Python all the time. So a thread
waits for the lock for at most as long as it works: where coming back is slow it lets go the less often.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LENGTH_S = 1e-4


class Slices:
    """Ends slices of one thread's work. ``clock`` returns seconds; ``let_go`` gives other threads the interpreter."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, let_go: Callable[[], None] = lambda: time.sleep(0)
    ) -> None:
        self._clock = clock
        self._let_go = let_go
        self._begun = clock()
        self._owed = 0.0  # seconds that were waited beyond those that were worked

    def begin(self) -> None:
        """Begins a slice, as the thread has waited and others have had the interpreter."""
        self._begun = self._clock()

    def between(self) -> None:
        """Ends the slice if it has been long enough. Called between two steps of the work."""
        now = self._clock()
        worked = now - self._begun
        if worked < LENGTH_S:
            return
        self._begun = now
        self._owed = max(0.0, self._owed - worked)
        if self._owed == 0.0:
            self._let_go()
            self._begun = self._clock()
            self._owed = self._begun - now
