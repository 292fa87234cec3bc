"""Which bytes of a file the page cache holds (cachestat(2), Linux 6.5), and how to have them thrown out."""

from __future__ import annotations

import ctypes
import os

_CACHESTAT = 451  # on every architecture
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Stat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def cached_pages(fd: int, offset: int = 0, length: int = 0) -> int | None:
    """How many pages of ``length`` bytes from ``offset`` on (0: to the end) are cached; None where that is not told."""
    wanted, found = _Range(offset, length), _Stat()
    if _LIBC.syscall(_CACHESTAT, fd, ctypes.byref(wanted), ctypes.byref(found), 0):
        return None
    return int(found.cached)


def evict(fd: int, offset: int = 0, length: int = 0) -> None:
    """Throw pages out that are on disk; ``os.fdatasync`` brings them there."""
    os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
