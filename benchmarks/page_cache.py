"""Which bytes of a file the page cache holds, and how to have them thrown out."""

from __future__ import annotations

import os

from minato_gpu.sources.disk.filesystem import cached_bytes

_PAGE = os.sysconf("SC_PAGE_SIZE")


def cached_pages(fd: int, offset: int = 0, length: int = 0) -> int | None:
    """How many pages of ``length`` bytes from ``offset`` on (0: to the end) are cached; None where that is not told."""
    found = cached_bytes(fd, offset, length)
    return None if found is None else found // _PAGE


def evict(fd: int, offset: int = 0, length: int = 0) -> None:
    """Throw pages out that are on disk; ``os.fdatasync`` brings them there."""
    os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
