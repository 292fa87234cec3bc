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
