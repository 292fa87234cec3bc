"""A part of the program in which no two threads may be at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_PAUSE_S = 1e-3


@contextmanager
def alone(inside: threading.Lock, otherwise: str) -> Iterator[None]:
    """Fails, saying ``otherwise``, where another thread is inside; gives others the time to come in."""
    assert inside.acquire(blocking=False), otherwise
    try:
        time.sleep(_PAUSE_S)
        yield
    finally:
        inside.release()
