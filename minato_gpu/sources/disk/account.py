"""The account of a directory: bytes of disk that count against the budget, and how many copies there are.

It is a small file. Whoever adds or removes a copy holds its lock (flock) meanwhile, so that the numbers are those of
the files. Bytes are added before they are written and taken off after they have been removed: a process that is killed
in between leaves numbers that are too high, never too low, until the next count. Damage is noticed by a checksum, and
has everything counted.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from minato_gpu.sources.disk.filesystem import OpenFile

_NAME = "account"
_NUMBERS = struct.Struct("<qq")
_SEAL_BYTES = 4


@dataclass
class Totals:
    """Bytes of disk, and copies."""

    nbytes: int = 0
    copies: int = 0


class Account:
    """The account of the directory that is open as ``root``; ``count`` counts it anew, while nothing changes."""

    def __init__(self, root: int, count: Callable[[], Totals]) -> None:
        self._root, self._count = root, count

    @contextmanager
    def change(self, *, last: bool = False) -> Iterator[Totals]:
        """Gives the numbers to be changed, with all other changes kept out. Not to be nested. Raises OSError.

        ``last``: they are to survive a loss of power.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = OpenFile(os.open(_NAME, flags, 0o600, dir_fd=self._root))  # a lock of its own, for each thread and fork
        try:
            fcntl.flock(file.fd, fcntl.LOCK_EX)
            before = os.pread(file.fd, _NUMBERS.size + _SEAL_BYTES, 0)
            totals = _unpacked(before) or self._count()
            try:
                yield totals
            finally:
                if (after := _packed(totals)) != before:
                    os.pwrite(file.fd, after, 0)
                if last:
                    os.fdatasync(file.fd)
        finally:
            file.close()

    def look(self) -> Totals:
        """Returns the numbers as they are just now. Raises OSError."""
        try:
            file = OpenFile(os.open(_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._root))
            found = _unpacked(os.pread(file.fd, _NUMBERS.size + _SEAL_BYTES, 0))
        except FileNotFoundError:
            found = None
        return found or self._count()


def _packed(totals: Totals) -> bytes:
    body = _NUMBERS.pack(totals.nbytes, totals.copies)
    return body + zlib.crc32(body).to_bytes(_SEAL_BYTES, "little")


def _unpacked(found: bytes) -> Totals | None:
    if len(found) != _NUMBERS.size + _SEAL_BYTES:
        return None
    totals = Totals(*_NUMBERS.unpack_from(found))
    return totals if _packed(totals) == found else None
