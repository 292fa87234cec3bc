"""What the standard library does not reach: holes in files, kinds of file systems, reads around the page cache."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable

_LIBC = ctypes.CDLL(None, use_errno=True)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_RWF_DONTCACHE = 0x80
_CACHESTAT = 451  # on every architecture
_PAGE = os.sysconf("SC_PAGE_SIZE")
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_FLUSH_BYTES = 8 << 20
_READ_BYTES = 1 << 16  # what a pipe has at most
# Memory maps and locks of an index are not coherent between hosts on these (Linux: magic numbers of statfs(2)).
_REMOTE = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFE534D42: "SMB",
    0xFF534D42: "CIFS",
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x5346414F: "AFS",
    0x01021997: "9P",
    0x19830326: "BeeGFS",
    0x65735546: "FUSE",
}


def punch_hole(fd: int, offset: int, length: int) -> bool:
    """Give ``length`` bytes from ``offset`` on back to the disk. They read as noughts. False where the disk cannot."""
    mode = _KEEP_SIZE | _PUNCH_HOLE
    if _LIBC.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number))


def remote_kind(path: str | os.PathLike[str]) -> str | None:
    """The name of the network file system that ``path`` lies on; None for a local one."""
    answer = (ctypes.c_long * 32)()  # larger than struct statfs; its first field is the type
    if _LIBC.statfs(os.fsencode(path), ctypes.byref(answer)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fspath(path))
    return _REMOTE.get(answer[0] & 0xFFFFFFFF)


def read_into(fd: int, into: memoryview, offset: int, flags: int = 0) -> int:
    """Read from ``offset`` on until ``into`` is full, or the file ends; returns how many bytes. Raises OSError."""
    done = 0
    try:
        while done < len(into) and (count := os.preadv(fd, [into[done:]], offset + done, flags)):
            done += count
    except OSError as error:
        if error.errno != errno.ESPIPE or offset:
            raise
        while done < len(into) and (count := os.readv(fd, [into[done:]])):  # a pipe begins where it stands
            done += count
    return done


def tells_size(found: os.stat_result) -> bool:
    """Whether a file has as many bytes as it says. Of pipes, devices and files of /proc, which are regular ones of no
    bytes, only reading tells."""
    return found.st_size > 0 and stat.S_ISREG(found.st_mode)


def read_to_end(fd: int, offset: int) -> bytes:
    """What a file that has just been opened, and does not tell its size, has from ``offset`` on. Raises OSError."""
    if offset:
        os.lseek(fd, offset, os.SEEK_SET)
    return b"".join(iter(lambda: os.read(fd, _READ_BYTES), b""))


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Cachestat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def cached_bytes(fd: int, offset: int = 0, length: int = 0) -> int | None:
    """How many of ``length`` bytes from ``offset`` on (0: to the end) the page cache has, in whole pages; None where
    that is not told (cachestat(2), Linux 6.5). No substitute: mincore tells it of files that one may write to only."""
    wanted, found = _Range(offset, length), _Cachestat()
    if _LIBC.syscall(_CACHESTAT, fd, ctypes.byref(wanted), ctypes.byref(found), 0):
        return None
    return int(found.cached) * _PAGE


class Uncached:
    """Reads and writes that leave the page cache as it was: what a tier keeps is not held a second time in memory.

    Kernels from 6.14 on do that by themselves on ext4, XFS and others (``dontcache``, RWF_DONTCACHE). For the rest,
    found out by trying, pages are given back after a read, and after some MB of writes once those have reached the
    disk.
    """

    def __init__(self, dontcache: bool = True) -> None:
        self._dontcache = dontcache
        self._written = 0  # bytes that are still in the page cache

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        """Read up to ``len(into)`` bytes from ``offset`` on; returns how many there were. Raises OSError."""
        if not self._dontcache:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # pages read ahead would stay
        done = self._call(os.preadv, fd, into, offset)
        while 0 < done < len(into) and (count := self._call(os.preadv, fd, into[done:], offset + done)):
            done += count
        if not self._dontcache:
            os.posix_fadvise(fd, offset, len(into), os.POSIX_FADV_DONTNEED)
        return done

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``. Raises OSError; part of it may have been written then."""
        done = 0
        while done < len(data):
            done += self._call(os.pwritev, fd, data[done:], offset + done)
        if self._dontcache:
            return
        self._written += len(data)
        if self._written >= _FLUSH_BYTES:
            os.fdatasync(fd)  # pages that wait for the disk would not be given back
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            self._written = 0

    def _call(self, act: Callable[[int, list[memoryview], int, int], int], fd: int, data: memoryview, at: int) -> int:
        if self._dontcache:
            try:
                return act(fd, [data], at, _RWF_DONTCACHE)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                self._dontcache = False
        return act(fd, [data], at, 0)
