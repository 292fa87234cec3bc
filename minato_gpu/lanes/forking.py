"""Processes that the training process starts: two things must not happen in them.

*Garbage* of a process that forks is its own to collect, not that of the process that is forked. A collection there
would finalise what the other has dropped and not collected yet. DALI's pipeline, for one, waits then for threads that
are not there after a fork, and does so for ever. So nothing is collected from before the fork until what was inherited
is set apart, which also leaves its pages shared.

*Ctrl-C and SIGTERM* are the training process's to handle, also where the whole group or job gets them: it may want some
more batches, to save at the end of a step. They wait until the new process disregards them; it ends with its parent.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.context import ForkProcess, SpawnProcess
from multiprocessing.process import BaseProcess
from typing import Any

_PARENTS = (signal.SIGINT, signal.SIGTERM)
_collects = True  # whether the process that forks does when it is not about to; a forked one inherits the answer


def start(process: BaseProcess) -> None:
    """Starts a process, whose own code must call ``begin`` first. Its ``terminate`` kills it from now on.

    Raises what starting it raises.
    """
    global _collects
    _collects = collects = gc.isenabled()
    gc.disable()
    if isinstance(process, SpawnProcess):
        resource_tracker.ensure_running()  # which would unblock the signals
    # the new process inherits the mask; that of a fork server would stay, for all else that it forks
    masked = _PARENTS if isinstance(process, (ForkProcess, SpawnProcess)) else ()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, masked)
    try:
        process.start()
        # who terminates all active children, and joins them, must not wait for one that disregards SIGTERM
        process.terminate = process.kill  # type: ignore[method-assign]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if collects:
            gc.enable()


def begin() -> None:
    """Prepares this new process: inherited garbage is never looked through, and Ctrl-C and SIGTERM do nothing here, as
    the parent handles them."""
    gc.freeze()
    if _collects:
        gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # a handler, as a program that is started from here would inherit that SIGTERM is ignored; so would what is forked
    signal.signal(signal.SIGTERM, _leave_to_parent)
    signal.siginterrupt(signal.SIGTERM, False)
    os.register_at_fork(after_in_child=_hear_again)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS)


def _leave_to_parent(number: int, frame: object) -> None:
    pass


def _hear_again() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def start_reader(context: Any, *arguments: Any) -> Any:
    """Starts and returns the reader process. It calls the first of ``arguments`` with the others; ``context`` is
    multiprocessing's."""
    started = context.Process(target=_main, args=arguments, name="minato-reader", daemon=True)
    start(started)
    return started


def _main(main: Callable[..., None], *arguments: Any) -> None:
    """Is the entry of the reader process."""
    begin()
    main(*arguments)
