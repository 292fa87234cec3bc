"""What is open must know when its process is forked: the copy in the child is not its own."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    """Something that another process's copy of must not be used."""

    def forked(self) -> None:
        """Called in the child."""


OPEN: weakref.WeakSet[Forkable] = weakref.WeakSet()


def _after_fork() -> None:
    for one in OPEN:
        one.forked()


os.register_at_fork(after_in_child=_after_fork)
