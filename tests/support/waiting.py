"""Waiting for a condition: the only way in which a test of this project waits."""

from __future__ import annotations

import time
from collections.abc import Callable

_PAUSE_S = 0.01


def wait_until(condition: Callable[[], object], limit_s: float = 60.0) -> bool:
    """True as soon as ``condition()`` is true; False when it is still false after ``limit_s`` seconds.

    The limit only bounds a failing test. A passing test takes as long as the condition takes.
    """
    end = time.monotonic() + limit_s
    while True:
        if condition():
            return True
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE_S)
