"""Work that is done in a forked process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

_FORK = multiprocessing.get_context("fork")
_LIMIT_S = 60.0


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
