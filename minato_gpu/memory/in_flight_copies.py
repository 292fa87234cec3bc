"""Copies that are under way, and what they read, which is kept until the device is through with them.

Of a load that had to be put back, the copies of the first attempt may be under way when it is issued anew or given up.
So each attempt is kept by itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import NamedTuple

from minato_gpu.memory.accelerator import Event
from minato_gpu.memory.loads import Load
from minato_gpu.memory.slabs import Slabs


class _Copies(NamedTuple):
    """One attempt at a load; ``event``: None where there is none, and nobody uses what was copied."""

    slabs: tuple[int, ...]
    keep: list[object]
    event: Event | None


class InFlightCopies:
    """The copies that have been issued on one stream, oldest first. Every method may be called by any thread."""

    def __init__(self, slabs: Slabs) -> None:
        self._slabs = slabs
        self._copies: deque[_Copies] = deque()
        self._sweeping = threading.Lock()

    def add(self, load: Load) -> None:
        """All or a part of a load has been issued."""
        copies = _Copies((*load.slabs, *load.staged), load.keep, load.event)
        self._slabs.read(copies.slabs)
        for slab in load.staged:
            self._slabs.drop(slab)
        load.staged, load.keep = [], []
        self._copies.append(copies)

    def sweep(self) -> None:
        """Let go of what copies that are through have read; never waits."""
        over: list[_Copies] = []
        with self._sweeping:
            while self._copies and _through(self._copies[0]):
                over.append(self._copies.popleft())
        self._release(over)

    def wait(self) -> None:
        """Until the device is through with all of them, or says what is wrong with it: it reads no more then, and who
        issues or takes the next batch is told."""
        for copies in list(self._copies):
            if copies.event is not None:
                with contextlib.suppress(Exception):
                    copies.event.synchronize()

    def close(self) -> None:
        """Wait, then let go of everything."""
        self.wait()
        with self._sweeping:
            over = list(self._copies)
            self._copies.clear()
        self._release(over)

    def _release(self, over: list[_Copies]) -> None:
        for copies in over:
            self._slabs.done(copies.slabs)


def _through(copies: _Copies) -> bool:
    """Whether the event has come to pass. Where it cannot be asked, what the copies read is kept: the device's error
    may be another's, and who issues or takes the next batch is told of it."""
    try:
        return copies.event is None or copies.event.query()
    except Exception:
        return False
