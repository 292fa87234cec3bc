"""Ctrl-C is the training process's to handle: the processes that it forks never hear it, not even as they begin."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkProcess
from multiprocessing.process import BaseProcess

_INTERRUPT = (signal.SIGINT,)


@contextmanager
def held(process: BaseProcess) -> Iterator[None]:
    """Start the process in here: it inherits that interrupts wait, and calls ``ignore`` first.

    Of a fork server the mask would stay, for whatever else it is asked to fork: there nothing is held.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPT if isinstance(process, ForkProcess) else ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore() -> None:
    """In the new process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPT)
