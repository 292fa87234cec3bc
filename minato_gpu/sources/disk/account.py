"""The account of a directory: bytes of disk that count against the budget, and how many copies there are.

It is a small file. Whoever adds or removes a copy holds its lock (flock) meanwhile, so that the numbers are those of
the files. Bytes are added before they are written and taken off after they have been removed: a process that is killed
in between leaves numbers that are too high, never too low, until the next count. Damage is noticed by a checksum, and
has everything counted.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from minato_gpu.sources.disk.entry import CacheEntry, scan
from minato_gpu.sources.disk.filesystem import OpenFile
from minato_gpu.sources.disk.runs import reserved

_NAME = "account"
_NUMBERS = struct.Struct("<qq")
_SEAL_BYTES = 4
_AT_A_TIME = 64  # copies that are removed under one lock
_MOST = 1 << 16  # copies that are evicted at a time


@dataclass
class Totals:
    """Bytes of disk that copies and unfinished files take, and how many copies there are."""

    nbytes: int = 0
    copies: int = 0


class Account:
    """The account of the directory at ``path``, which is open as ``root``. Methods raise OSError."""

    def __init__(self, path: Path, root: int) -> None:
        self._path, self._root = path, root

    @contextmanager
    def change(self) -> Iterator[Totals]:
        """Yields the totals to be changed, which are written when the block ends (also by an error), with all other
        changes locked out. Not to be nested."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = OpenFile(os.open(_NAME, flags, 0o600, dir_fd=self._root))  # a lock of its own, for each thread and fork
        try:
            fcntl.flock(file.fd, fcntl.LOCK_EX)
            before = os.pread(file.fd, _NUMBERS.size + _SEAL_BYTES, 0)
            totals = _unpacked(before) or self.count_all()
            try:
                yield totals
            finally:
                if (after := _packed(totals)) != before:
                    os.pwrite(file.fd, after, 0)
        finally:
            file.close()

    def look(self) -> Totals:
        """Returns the totals as they are just now, without a lock; counts all where the account is not there or
        damaged."""
        try:
            file = OpenFile(os.open(_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._root))
            found = _unpacked(os.pread(file.fd, _NUMBERS.size + _SEAL_BYTES, 0))
        except FileNotFoundError:
            found = None
        return found or self.count_all()

    def remove(self, names: Iterable[str], inode: int = 0) -> Totals:
        """Removes copies that are there, by name; with ``inode`` (0: any) only that file. Returns what was removed."""
        gone, rest = Totals(), iter(names)
        while chunk := list(islice(rest, _AT_A_TIME)):
            with self.change() as totals:
                for name in chunk:
                    with suppress(FileNotFoundError):
                        found = os.stat(name, dir_fd=self._root, follow_symlinks=False)
                        if inode in (0, found.st_ino):
                            self._unlink(name, found.st_blocks * 512, totals)
                            gone.nbytes, gone.copies = gone.nbytes + found.st_blocks * 512, gone.copies + 1
        return gone

    def evict(self, room: int, spare: int, before: float) -> int:
        """Removes copies last used before ``before`` (s), the longest unused first, until ``spare`` of ``room`` bytes
        are free, but no more than 65,536. All is counted anew, as all of it is looked at. Returns how many were
        removed."""
        evicted = 0
        with self.change() as totals:
            old = ((each.used_at, each) for each in self._count_each(totals) if each.used_at < before)
            for _, each in heapq.nsmallest(_MOST, old):
                if totals.nbytes <= room - spare:
                    break
                self._unlink(each.name, each.nbytes, totals)
                evicted += 1
        return evicted

    def _unlink(self, name: str, nbytes: int, totals: Totals) -> None:
        os.unlink(name, dir_fd=self._root)
        totals.nbytes, totals.copies = totals.nbytes - nbytes, totals.copies - 1

    def _count_each(self, totals: Totals) -> Iterator[CacheEntry]:
        """Yields every copy, and sets ``totals`` to what copies and unfinished files take."""
        totals.nbytes, totals.copies = reserved(self._root), 0
        for entry in scan(self._path):
            totals.nbytes += entry.nbytes
            totals.copies += 1
            yield entry

    def count_all(self) -> Totals:
        """Returns the totals, counted anew."""
        totals = Totals()
        for _ in self._count_each(totals):
            pass
        return totals


def _packed(totals: Totals) -> bytes:
    body = _NUMBERS.pack(totals.nbytes, totals.copies)
    return body + zlib.crc32(body).to_bytes(_SEAL_BYTES, "little")


def _unpacked(found: bytes) -> Totals | None:
    if len(found) != _NUMBERS.size + _SEAL_BYTES:
        return None
    totals = Totals(*_NUMBERS.unpack_from(found))
    return totals if _packed(totals) == found else None
