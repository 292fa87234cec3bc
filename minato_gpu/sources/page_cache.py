"""Reads ahead into the page cache: the kernel brings a file's bytes into memory and keeps them there.

A worker then reads the file as if nothing had been done for it, without waiting for the disk. Its bytes are in memory
once and are copied once; by way of shared memory they would be there twice. So files of a local disk are read unless
something is to be kept of them (``Service.may_keep``). Where the kernel lets go of them too early, shared memory it is
(``PageCache``).

The reader has the kernel send the bytes to /dev/null: ``sendfile`` waits until the page cache has them, and copies none
(measured, 95 KB cold: 55 µs of CPU instead of 105 for reading them into shared memory). Rejected:
``POSIX_FADV_WILLNEED``, which does not tell when the bytes are there.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from functools import cache
from itertools import count

import numpy as np
from numpy.typing import NDArray

from minato_gpu.sources.disk.filesystem import read_into, remote_kind, tells_size
from minato_gpu.sources.source import Source
from minato_gpu.util.messages import LOGGER

_MOST = 1 << 30  # bytes of one call
_EVERY, _LATER = 16, 32  # every so many reads one is looked at again, when so many more have been chosen for that
_LOOKED = 16  # at most a quarter of so many may have gone


class PageCache:
    """Brings files into the page cache until it finds that they do not stay there. Several threads may use it."""

    def __init__(self) -> None:
        self.keeps = True  # what is brought in stays long enough; once False, nothing is brought in any more
        self._numbers = count()
        self._chosen: deque[tuple[Source, int]] = deque()
        self._gone: deque[bool] = deque(maxlen=_LOOKED)

    def bring_in(self, file: int, source: Source) -> int | None:
        """Brings a source of an open file in, and returns and raises as the module's ``bring_in``; None also once it is
        known that what is brought in does not stay."""
        if not self.keeps:
            return None
        nbytes = bring_in(file, source)
        if nbytes is not None and next(self._numbers) % _EVERY == 0:
            self._chosen.append((source, nbytes))
            if len(self._chosen) > _LATER:
                self._look_at(*self._chosen.popleft())
        return nbytes

    def _look_at(self, source: Source, nbytes: int) -> None:
        """Looks whether a source that was brought in some 500 reads ago is still there."""
        self._gone.append(read(source, nbytes) is None)
        if self.keeps and self._gone.count(True) > _LOOKED // 4:
            self.keeps = False
            LOGGER.warning(
                "The page cache does not keep what is read ahead: memory is short. Files are read into shared memory "
                "from now on. (Said once.)"
            )


def bring_in(file: int, source: Source) -> int | None:
    """Waits until the page cache holds a source of this open file; returns how many bytes the source has.

    None if that is of no use: of a network file system, which asks the server again, and of what is no regular file, or
    does not tell its size, or cannot be sent. Raises OSError, EOFError.
    """
    found = os.fstat(file)
    if not tells_size(found) or not _is_local(found.st_dev, source):
        return None
    nbytes = max(0, found.st_size - source.offset) if source.length is None else source.length
    at = 0
    while at < nbytes:
        try:
            sent = os.sendfile(_nowhere(), file, source.offset + at, min(nbytes - at, _MOST))
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOSYS):  # a file system that cannot
                return None
            raise
        if not sent:
            raise EOFError(f"{source} ends {nbytes - at} bytes too early")
        at += sent
    return nbytes


def read(source: Source, nbytes: int) -> NDArray[np.uint8] | None:
    """Returns the bytes of a source that has been brought in: uint8 (nbytes,), the caller's own.

    None if they are not there any more, or the file has changed its size. It waits for the disk only on a file system
    that cannot tell whether it would have to.
    """
    try:
        file = os.open(source.file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if source.length is None and os.fstat(file).st_size - source.offset != nbytes:
            return None
        data = np.empty(nbytes, np.uint8)
        try:
            found = read_into(file, data.data, source.offset, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:  # a file system that does not tell
                raise
            found = read_into(file, data.data, source.offset)
        return data if found == nbytes else None
    except OSError:  # EAGAIN: the disk would have to be waited for
        return None
    finally:
        os.close(file)


@cache
def _nowhere() -> int:
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


_LOCAL: dict[int, bool] = {}  # by device


def _is_local(device: int, source: Source) -> bool:
    known = _LOCAL.get(device)
    if known is None:
        known = _LOCAL[device] = remote_kind(source.file) is None
    return known
