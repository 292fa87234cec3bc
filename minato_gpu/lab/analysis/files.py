"""What the page cache holds of some files, and how to have it let go of them or read them in."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator

from minato_gpu.sources.disk.filesystem import cached_bytes

_CHUNK = 1 << 20


def cached_share(files: Iterable[str]) -> float | None:
    """Of the files' bytes, the share that the page cache holds, as ``cachestat`` says: None where the kernel does not
    tell, or there are none. Files that cannot be opened count for nothing."""
    nbytes, cached = 0, 0
    told = True
    for file in _opened(files):
        with contextlib.suppress(OSError):
            size = os.fstat(file).st_size
            found = cached_bytes(file) if size else 0
            nbytes += size
            told = told and found is not None
            cached += min(found or 0, size)  # whole pages count
    return cached / nbytes if told and nbytes else None


def drop(files: Iterable[str]) -> None:
    """Ask the page cache to let go of these files, which another process may prevent: ``cached_share`` tells."""
    for file in _opened(files):
        with contextlib.suppress(OSError):
            os.fdatasync(file)  # pages that are not on disk yet would stay
        with contextlib.suppress(OSError):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def read_in(files: Iterable[str], goes_on: Callable[[], bool]) -> None:
    """Read the files, so that the page cache has them, while there is time."""
    for file in _opened(files):
        with contextlib.suppress(OSError):
            while goes_on() and os.read(file, _CHUNK):
                pass


def _opened(files: Iterable[str]) -> Iterator[int]:
    """Descriptors, for reading, of those that can be opened."""
    for path in files:
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                yield file
            finally:
                os.close(file)
