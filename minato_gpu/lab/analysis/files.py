"""Files that samples are in: which ones a call reads, and what the page cache holds of them.

An audit hook hears of every file that Python opens; libraries that open files by themselves are not heard. The kernel
counts the bytes of all ``read`` calls. Where bytes were read and no file was opened, it is one that is open already, or
mapped. What neither tells is unknown.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import NamedTuple

import psutil

from minato_gpu.sources.disk.filesystem import cached_bytes

_CODE = (".py", ".pyc", ".so", ".pth")
_LOOKED_FOR = 16  # calls
_SYSTEM = ("/proc/", "/dev/", "/sys/")

FOLDER = "minato_gpu_analysis_"
"""How the names of the folders begin in which the analysis leaves its files."""


class MeasuredReads(NamedTuple):
    """The reads of one call: files, bytes, and read requests (of a sample, where one call makes several)."""

    files: tuple[str, ...] = ()
    nbytes: float = 0.0
    requests: float = 0.0


class _Heard(threading.local):
    """Files that this thread has opened since it began to listen; None: nobody listens."""

    files: list[str] | None = None


_HEARD = _Heard()
_HEARD_BY_ALL: list[list[str]] = []  # of a process that prepares one sample at a time: helper threads' files too


class Look:
    """Looks at one call after the other, each from ``begin`` to ``end``. Each thread makes one of its own."""

    def __init__(self) -> None:
        _listen()
        # a worker process prepares one sample at a time, so all that happens in it belongs to that sample
        self._alone = multiprocessing.parent_process() is not None
        self._counts = -1
        self._before = self._own = (0, 0)
        self._calls = 0
        self._still: tuple[str, ...] = ()  # open or mapped when it was last looked for
        with contextlib.suppress(OSError):
            path = "/proc/self/io" if self._alone else "/proc/thread-self/io"
            self._counts = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def begin(self) -> None:
        """Begins to count reads."""
        _HEARD.files = []
        if self._alone:
            _HEARD_BY_ALL[:] = [_HEARD.files]
        self._before = self._read()

    def end(self) -> MeasuredReads:
        """Returns the reads since ``begin``."""
        nbytes, requests = (now - then for now, then in zip(self._read(), self._before, strict=True))
        heard, _HEARD.files = _HEARD.files or [], None
        _HEARD_BY_ALL.clear()
        files = tuple(dict.fromkeys(path for path in heard if _is_data(path)))
        if self._counts < 0:  # the kernel does not count for us
            return MeasuredReads(files, float(sum(map(_size, files))), float(len(files)))
        if files:
            # what is read twice comes from storage once
            return MeasuredReads(files, float(min(nbytes, sum(map(_size, files)))), float(min(requests, len(files))))
        if self._calls < _LOOKED_FOR:  # it takes milliseconds
            self._still = held_files() if nbytes > 0 else mapped_files()
            self._calls += 1
        return MeasuredReads(self._still, float(nbytes), float(requests)) if nbytes > 0 else MeasuredReads(self._still)

    def _read(self) -> tuple[int, int]:
        """Returns bytes and calls so far, without this call: the kernel counts it after it has answered."""
        if self._counts < 0:
            return 0, 0
        data = os.pread(self._counts, 512, 0)
        found = dict(line.split(b": ") for line in data.splitlines())
        nbytes, calls = int(found[b"rchar"]) - self._own[0], int(found[b"syscr"]) - self._own[1]
        self._own = self._own[0] + len(data), self._own[1] + 1
        return nbytes, calls


@cache
def _listen() -> None:
    """Installs an audit hook. It stays for the process's life, and does nothing while no thread listens."""
    sys.addaudithook(_heard)


def _heard(event: str, arguments: tuple[object, ...]) -> None:
    if event != "open":
        return
    files = _HEARD.files if _HEARD.files is not None else _HEARD_BY_ALL[0] if _HEARD_BY_ALL else None
    if files is None:
        return
    path, _, flags = arguments
    if isinstance(flags, int) and flags & os.O_ACCMODE == os.O_WRONLY:
        return
    if isinstance(path, (str, bytes)):
        files.append(os.fsdecode(path))


def held_files() -> tuple[str, ...]:
    """Returns the data files that this process has open for reading."""
    held = psutil.Process().open_files()
    return tuple(dict.fromkeys(each.path for each in held if each.mode not in ("w", "a") and _is_data(each.path)))


def mapped_files() -> tuple[str, ...]:
    """Returns the data files that are mapped into this process's memory; code and its packages' own are left out."""
    paths = [each.path for each in psutil.Process().memory_maps()]
    return tuple(path for path in paths if _is_data(path) and not _is_installed(path))


def _is_installed(path: str) -> bool:
    return ".so." in path or path.startswith(("/usr/", "/lib", sys.prefix, sys.base_prefix))


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116
    except OSError:
        return 0


@cache
def _is_data(path: str) -> bool:
    """Returns whether this is a regular file that is no code, and none of the system's or of the analysis's own."""
    if path.endswith(_CODE) or path.startswith(_SYSTEM) or f"/{FOLDER}" in path:
        return False
    try:
        return stat.S_ISREG(os.stat(path).st_mode)  # noqa: PTH116
    except (OSError, ValueError):
        return False


_CHUNK = 1 << 20


def cached_share(files: Iterable[str]) -> float | None:
    """Returns the share of the files' bytes in the page cache, as ``cachestat`` says: None where the kernel does not
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
    """Asks the page cache to drop these files. Another process may prevent it: ``cached_share`` tells."""
    for file in _opened(files):
        with contextlib.suppress(OSError):
            os.fdatasync(file)  # pages that are not on disk yet would stay
        with contextlib.suppress(OSError):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def read_in(files: Iterable[str], goes_on: Callable[[], bool]) -> None:
    """Reads the files, so that the page cache has them, as long as ``goes_on()``; skips those that cannot be read."""
    for file in _opened(files):
        with contextlib.suppress(OSError):
            while goes_on() and os.read(file, _CHUNK):
                pass


def _opened(files: Iterable[str]) -> Iterator[int]:
    """Yields a descriptor, for reading, of each file that can be opened, and closes it afterwards."""
    for path in files:
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                yield file
            finally:
                os.close(file)
