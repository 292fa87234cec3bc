"""Segment files: those that are read from stay open for a while, and one this process appends to.

A segment is written by one process at a time, which holds its lock (flock): the lock of a dead process is free.
Numbers of segments are never used again, so an open file is always the right one.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from functools import lru_cache, partial

_MOST_OPEN = 128
_ENDING = ".seg"


class OpenFile:
    """A file that is closed with its last holder, so that the number of an open file is not reused under one."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def cut(self, end: int) -> None:
        """Let it end at ``end``."""
        os.ftruncate(self.fd, end)

    def close(self) -> None:
        """Close it now."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


class SegmentFiles:
    """The files of ``folder``, an open descriptor that stays the caller's. May be used by several threads."""

    def __init__(self, folder: int) -> None:
        self._folder = folder
        self._opened = lru_cache(_MOST_OPEN)(partial(_opened, folder))

    def opened(self, number: int) -> OpenFile:
        """The file, to be held while its ``fd`` is in use. Raises OSError where there is none."""
        return self._opened(number)

    def create(self, number: int) -> OpenFile:
        """A new file, with this process as its writer."""
        self.delete(number)  # one whose account was never opened, because its maker died just then
        made = _opened(self._folder, number, os.O_CREAT | os.O_EXCL)
        fcntl.flock(made.fd, fcntl.LOCK_EX)
        return made

    def take(self, number: int) -> OpenFile | None:
        """A file whose writer is gone, with this process in its place; None where it has a writer, or is not there."""
        try:
            found = _opened(self._folder, number)
            fcntl.flock(found.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileNotFoundError, BlockingIOError):
            return None
        return found

    def delete(self, number: int) -> None:
        """Free the file's space at once, also where others have it open; those find fewer bytes than they expect."""
        self._opened.cache_clear()  # it may be one of them; the others are opened again
        with suppress(FileNotFoundError):
            _opened(self._folder, number).cut(0)
            os.unlink(_name(number), dir_fd=self._folder)

    def numbers(self) -> set[int]:
        """Of the files that are there."""
        with os.scandir(self._folder) as found:
            return {int(file.name.removesuffix(_ENDING), 16) for file in found if file.name.endswith(_ENDING)}

    def close(self) -> None:
        """Forget the open files."""
        self._opened.cache_clear()


def _opened(folder: int, number: int, flags: int = 0) -> OpenFile:
    return OpenFile(os.open(_name(number), os.O_RDWR | os.O_NOFOLLOW | flags, 0o600, dir_fd=folder))


def _name(number: int) -> str:
    return f"{number:016x}{_ENDING}"
