"""Loads whose copies are under way: what those read is kept until the device is through with them."""

from __future__ import annotations

import contextlib
import threading
from collections import deque

from minato_gpu.memory.loads import Load
from minato_gpu.memory.slabs import Slabs


class UnderWay:
    """The loads that have been issued on one stream, oldest first. Every method may be called by any thread."""

    def __init__(self, slabs: Slabs) -> None:
        self._slabs = slabs
        self._loads: deque[Load] = deque()
        self._sweeping = threading.Lock()

    def add(self, load: Load) -> None:
        """A load has been issued."""
        self._loads.append(load)

    def sweep(self) -> None:
        """Let go of what loads that are through have read; never waits."""
        over: list[Load] = []
        with self._sweeping:
            while self._loads and _through(self._loads[0]):
                over.append(self._loads.popleft())
        self._release(over)

    def wait(self) -> None:
        """Until the device is through with all of them, or says what is wrong with it: it reads no more then, and who
        issues or takes the next batch is told."""
        for load in list(self._loads):
            if load.event is not None:
                with contextlib.suppress(Exception):
                    load.event.synchronize()

    def close(self) -> None:
        """Wait, then let go of everything."""
        self.wait()
        with self._sweeping:
            over = list(self._loads)
            self._loads.clear()
        self._release(over)

    def _release(self, loads: list[Load]) -> None:
        for load in loads:
            self._slabs.done(load.slabs)
            load.keep = []


def _through(load: Load) -> bool:
    """Whether the load's event has come to pass. Where it cannot be asked, what the load reads is kept: the device's
    error may be another's, and who issues or takes the next batch is told of it."""
    try:
        return load.event is None or load.event.query()
    except Exception:
        return False
