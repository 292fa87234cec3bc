"""The address space that may be reserved."""

from __future__ import annotations

import resource
from pathlib import Path

LEAST = 1 << 26  # bytes: less would not do
_PAGE = resource.getpagesize()


def share(most: int, part: int = 8) -> int:
    """Returns how many bytes to reserve: ``most``, or under a limit a ``part``-th of what is left, and ``LEAST`` at
    least."""
    left = _left()
    return most if left is None else min(most, max(LEAST, left // part // LEAST * LEAST))


def largest_file() -> int:
    """Returns the most bytes that a file, and shared memory, may have (``ulimit -f``)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return 1 << 62 if limit == resource.RLIM_INFINITY else limit


def _left() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    return limit - int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
