"""Records which processes have a cache directory open, and since when each has used all copies that it needs.

A *run* is a tier with a budget, open in a process. It has a directory of its own, which holds its lock (flock) as long
as the process lives, its record, and the files that it writes. Where the lock is free the process has died: what it was
writing is removed with the directory, and its bytes are taken off the account (account.py: how many bytes and copies
the directory holds).

The record is a time in seconds since 1970: every copy that is of use to the run has been used since then. It is 0.0 in
a run's first epoch, when any copy may be, and later the time at which the run began.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
from collections.abc import Iterable
from contextlib import suppress
from uuid import uuid4

from minato_gpu.sources.disk.filesystem import OpenFile

_FOLDER = "runs"
_RECORD = "record"
_SINCE = struct.Struct("<d")


class CacheRun:
    """This process's run in a cache directory, open as ``root``. Raises OSError.

    The caller holds the lock of the directory's account as it makes or closes the run, or makes a file.
    """

    def __init__(self, root: int) -> None:
        self.name = uuid4().hex
        with suppress(FileExistsError):
            os.mkdir(_FOLDER, 0o700, dir_fd=root)
        os.mkdir(f"{_FOLDER}/{self.name}", 0o700, dir_fd=root)
        self._root, self._files = root, 0
        self.folder = OpenFile(_opened(root, f"{_FOLDER}/{self.name}"))
        fcntl.flock(self.folder.fd, fcntl.LOCK_EX)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._file = OpenFile(os.open(_RECORD, flags, 0o600, dir_fd=self.folder.fd))
        self.began = os.fstat(self._file.fd).st_mtime  # by the clock of the files
        self.has_read = False  # whether its first epoch has ended
        self._epochs = 0

    @property
    def uses_since(self) -> float:
        """The time since which every copy that is of use to the run has been used; 0.0: any may be."""
        return self.began if self.has_read else 0.0

    def begin_epoch(self) -> None:
        """Writes into the record that an epoch begins: from the second one on, the time at which the run began."""
        self._epochs += 1
        self.has_read = self._epochs > 1
        os.pwrite(self._file.fd, _SINCE.pack(self.uses_since), 0)

    def new_file(self, nbytes: int) -> tuple[str, int]:
        """Makes a file for a copy of so many bytes of disk; returns its name in ``folder``, and its descriptor, which
        the caller closes."""
        self._files += 1
        name = f"{nbytes}-{self._files}"
        return name, os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self.folder.fd)

    def close(self) -> None:
        """Ends the run: removes its directory with its unfinished files, and frees its lock."""
        shutil.rmtree(f"{_FOLDER}/{self.name}", ignore_errors=True, dir_fd=self._root)
        self._file.close()
        self.folder.close()


def find_runs(root: int, mine: str = "") -> tuple[list[float], list[str]]:
    """Returns the records of the runs that live, but for ``mine``, and the names of those that have died."""
    living, dead = list[float](), list[str]()
    for name in _names(root, _FOLDER):
        if name == mine:
            continue
        try:
            folder = OpenFile(_opened(root, f"{_FOLDER}/{name}"))
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            fcntl.flock(folder.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            dead.append(name)
        except BlockingIOError:
            living.append(_record(folder.fd))
        folder.close()
    return living, dead


def remove_dead(root: int, dead: Iterable[str]) -> int:
    """Removes the directories of runs that have died; returns how many bytes they had reserved on the account."""
    freed = 0
    for name in dead:
        freed += _reserved(root, name)
        shutil.rmtree(f"{_FOLDER}/{name}", ignore_errors=True, dir_fd=root)
    return freed


def reserved(root: int) -> int:
    """Returns the bytes reserved on the directory's account for files that are being written."""
    return sum(_reserved(root, name) for name in _names(root, _FOLDER))


def _record(folder: int) -> float:
    """Returns the record of the run in ``folder``; 0.0 if it cannot be read."""
    try:
        file = OpenFile(os.open(_RECORD, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder))
        (since,) = _SINCE.unpack(os.pread(file.fd, _SINCE.size, 0))
        return float(since)
    except (OSError, struct.error):
        return 0.0


def _reserved(root: int, name: str) -> int:
    sizes = (file.partition("-")[0] for file in _names(root, f"{_FOLDER}/{name}"))
    return sum(int(size) for size in sizes if size.isdecimal())


def _names(root: int, folder: str) -> list[str]:
    try:
        opened = OpenFile(_opened(root, folder))
        return os.listdir(opened.fd)  # noqa: PTH208  # of a descriptor
    except (FileNotFoundError, NotADirectoryError):
        return []


def _opened(root: int, folder: str) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=root)
