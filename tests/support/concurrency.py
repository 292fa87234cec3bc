"""Threads and processes beside the test: who may be at once, who is kept from running, work in a forked process."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_PAUSE_S = 1e-3
_FORK = multiprocessing.get_context("fork")
_LIMIT_S = 60.0


@contextmanager
def alone(inside: threading.Lock, otherwise: str) -> Iterator[None]:
    """Fails, saying ``otherwise``, where another thread is inside; gives others the time to come in."""
    assert inside.acquire(blocking=False), otherwise
    try:
        time.sleep(_PAUSE_S)
        yield
    finally:
        inside.release()


def said_by_a_child(work: Callable[[], Any]) -> Any:
    """What ``work`` returns, or raises, in a process that is forked here."""

    def child() -> None:
        try:
            theirs.send(work())
        except Exception as error:
            theirs.send(error)

    ours, theirs = _FORK.Pipe()
    process = _FORK.Process(target=child)
    process.start()
    try:
        assert ours.poll(_LIMIT_S), "the child hangs"
        said = ours.recv()
        process.join()
        return said
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()
        theirs.close()


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
