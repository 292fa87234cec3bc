"""Processes that the training process forks: two things must not happen in them before they have begun.

*Garbage* of a process that forks is its own to collect, not that of the process that is forked. A collection there
would finalise what the other has dropped and not collected yet. DALI's pipeline, for one, waits then for threads that
are not there after a fork, and does so for ever. So nothing is collected from before the fork until what was inherited
is set apart, which also leaves its pages shared.

*Ctrl-C* is the training process's to handle: an interrupt waits until the new process ignores it.
"""

from __future__ import annotations

import gc
import signal
from multiprocessing.context import ForkProcess
from multiprocessing.process import BaseProcess

_INTERRUPT = (signal.SIGINT,)
_collects = True  # whether the process that forks does when it is not about to; a forked one inherits the answer


def start(process: BaseProcess) -> None:
    """Start a process that calls ``begin`` first."""
    global _collects
    _collects = collects = gc.isenabled()
    gc.disable()
    # what is forked inherits that interrupts wait; of a fork server the mask would stay, for all else that it forks
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPT if isinstance(process, ForkProcess) else ())
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if collects:
            gc.enable()


def begin() -> None:
    """In the new process: what was inherited is never looked through; new garbage is collected as it was before, and
    interrupts are ignored."""
    gc.freeze()
    if _collects:
        gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPT)
