"""What the page cache holds of some files, and how to have it let go of them or read them in."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from minato_gpu.sources.disk.filesystem import cached_bytes

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Cached:
    """Bytes of some files, and how many of them the page cache holds: None where the kernel does not tell."""

    nbytes: int
    cached: int | None

    @property
    def share(self) -> float | None:
        """Of the bytes; whole pages count, so that it may be cut off at 1."""
        if self.cached is None or not self.nbytes:
            return None
        return min(self.cached / self.nbytes, 1.0)


def look_up(files: Iterable[str]) -> Cached:
    """Ask ``cachestat``. Files that cannot be opened count for nothing."""
    nbytes, cached = 0, 0
    told = True
    for path in files:
        with contextlib.suppress(OSError), _Open(path) as file:
            size = os.fstat(file.number).st_size
            found = cached_bytes(file.number) if size else 0
            nbytes += size
            told = told and found is not None
            cached += min(found or 0, size)
    return Cached(nbytes, cached if told else None)


def drop(files: Iterable[str]) -> None:
    """Ask the page cache to let go of these files, which another process may prevent: ``look_up`` tells."""
    for path in files:
        with contextlib.suppress(OSError), _Open(path) as file:
            with contextlib.suppress(OSError):
                os.fdatasync(file.number)  # pages that are not on disk yet would stay
            os.posix_fadvise(file.number, 0, 0, os.POSIX_FADV_DONTNEED)


def read_in(files: Iterable[str], goes_on: Callable[[], bool]) -> None:
    """Read the files, so that the page cache has them, while there is time."""
    for path in files:
        with contextlib.suppress(OSError), _Open(path) as file:
            while goes_on() and os.read(file.number, _CHUNK):
                pass


class _Open:
    """A file's descriptor, for reading."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.number = -1

    def __enter__(self) -> _Open:
        self.number = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.number)
