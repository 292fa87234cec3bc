"""Calls that the standard library lacks: kinds of file systems, whole reads and writes, what the page cache has."""

from __future__ import annotations

import ctypes
import errno
import os
import stat

_LIBC = ctypes.CDLL(None, use_errno=True)
_CACHESTAT = 451  # on every architecture
_PAGE = os.sysconf("SC_PAGE_SIZE")
_READ_BYTES = 1 << 16  # what a pipe has at most
# Locks do not hold between hosts on these, or not always (Linux: magic numbers of statfs(2)).
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


class OpenFile:
    """A descriptor that is closed when nobody refers to it any more: so nobody uses it after it stands for another
    file."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        """Closes it now."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


def remote_kind(path: str | os.PathLike[str]) -> str | None:
    """Returns the network file system that ``path`` is on, such as "NFS"; None for a local one. FUSE counts as one, as
    what is behind it is not known. Raises OSError."""
    answer = (ctypes.c_long * 32)()  # larger than struct statfs; its first field is the type
    if _LIBC.statfs(os.fsencode(path), ctypes.byref(answer)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fspath(path))
    return _REMOTE.get(answer[0] & 0xFFFFFFFF)


def read_into(fd: int, into: memoryview, offset: int, flags: int = 0) -> int:
    """Reads from ``offset`` on until ``into`` is full, or the file ends; returns how many bytes. Raises OSError.

    ``flags``: those of preadv2(2).
    """
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
    """Returns whether a file has as many bytes as it says.

    Of pipes, devices and files of /proc, which are regular ones of no bytes, only reading tells.
    """
    return found.st_size > 0 and stat.S_ISREG(found.st_mode)


def read_to_end(fd: int, offset: int) -> bytes:
    """Returns the bytes from ``offset`` on of a file that has just been opened and does not tell its size.

    Raises OSError.
    """
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
    """Returns how many of ``length`` bytes from ``offset`` on (0: to the end) the page cache has, in whole pages.

    None where the kernel cannot report it (cachestat(2), Linux 6.5). No substitute: mincore reports it of files that
    one may write to only.
    """
    wanted, found = _Range(offset, length), _Cachestat()
    if _LIBC.syscall(_CACHESTAT, fd, ctypes.byref(wanted), ctypes.byref(found), 0):
        return None
    return int(found.cached) * _PAGE


def read_parts(fd: int, head: bytearray, into: memoryview) -> int:
    """Reads the beginning of a file into ``head``, and what follows into ``into``; returns how many bytes in all.

    Raises OSError.
    """
    done = os.preadv(fd, [head, into], 0)
    if len(head) <= done < len(head) + len(into):
        done += read_into(fd, into[done - len(head) :], done)
    return done


def write_parts(fd: int, head: bytes, data: memoryview) -> None:
    """Writes ``head`` and ``data`` into a new file. Raises OSError; part of it may have been written then."""
    done = os.pwritev(fd, [head, data], 0)
    while len(head) <= done < len(head) + len(data):
        done += os.pwrite(fd, data[done - len(head) :], done)
    if done < len(head):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
