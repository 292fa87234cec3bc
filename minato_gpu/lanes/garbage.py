"""Garbage of a process that forks is its own to collect, not that of the process that is forked.

A collection in the new process would finalise what the other has dropped and not collected yet. DALI's pipeline, for
one, waits then for threads that are not there after a fork, and does so for ever. So nothing is collected from before
the fork until what was inherited is set apart, which also leaves its pages shared.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_collects = True  # whether the process that forks does when it is not about to; a forked one inherits the answer


@contextmanager
def uncollected() -> Iterator[None]:
    """Fork in here; what is forked calls ``set_apart`` first."""
    global _collects
    _collects = collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def set_apart() -> None:
    """In the new process: what was inherited is never looked through; new garbage is collected as it was before."""
    gc.freeze()
    if _collects:
        gc.enable()
