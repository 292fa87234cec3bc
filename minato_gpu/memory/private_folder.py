"""The folder in which processes of one user, and no one else, find each other's sockets and shared files.

``$XDG_RUNTIME_DIR/minato-gpu``, or ``minato-gpu-UID`` in the folder for temporary files: of mode 0700, and the user's
own. Anybody may make a folder in the latter: one that is a link, or belongs to another, or lets others in, is refused.

It is opened once, looked at through its descriptor, and used by way of that (``/proc/self/fd/N/PID``): nobody can put
another in its place meanwhile, and no path is too long for a socket's name, which the kernel limits to 107 bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

_PRIVATE = 0o700
_LOOK_AGAIN_S = 10e-3  # at whether the lock is free: the kernel's own wait has no end
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class FolderRefused(OSError):
    """The folder cannot be trusted."""


class PrivateFolder:
    """An open folder of sockets, named by a process id or a text, and of shared files. ``path`` is for people to
    read."""

    def __init__(self) -> None:
        """Opens the folder, and makes it if there is none. Raises OSError (FolderRefused) if it cannot be used."""
        self.path = folder_path()
        with contextlib.suppress(FileExistsError):
            self.path.mkdir(mode=_PRIVATE)
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except NotADirectoryError:  # said of a link, too
            raise FolderRefused(f"{self.path} is a link, or no folder") from None
        try:
            _check(self.path, os.fstat(self._fd))
        except BaseException:
            self.close()
            raise

    def pids(self) -> list[int]:
        """Returns the ids after which sockets are named: of processes that have one, or had one when they were
        killed."""
        names = [path.name for path in Path(self._path_of("")).iterdir()]
        return sorted(int(name) for name in names if name.isascii() and name.isdigit())

    def listen(self, pid: int) -> socket.socket:
        """Returns a listening socket named after this process, whose id is ``pid``; removes one that an ended process
        of the same id has left.

        Raises OSError (EADDRINUSE) if a process of another container has that name.
        """
        self.remove_stale(pid, own=True)
        return self.bind(pid)

    def bind(self, name: int | str, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """Returns a listening socket of this name. Raises OSError (EADDRINUSE) if there is one."""
        listening = socket.socket(socket.AF_UNIX, kind)
        try:
            listening.bind(self._path_of(name))
            listening.listen()
        except BaseException:
            listening.close()
            raise
        return listening

    def connect(self, name: int | str, timeout: float, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """Returns a connection to the socket of this name, made within ``timeout`` seconds, which stays its time-out.

        Raises FolderRefused if another user's process has answered, else OSError.
        """
        connection = socket.socket(socket.AF_UNIX, kind)
        try:
            connection.settimeout(timeout)
            connection.connect(self._path_of(name))
            if not is_ours(connection):
                raise FolderRefused(f"the socket {self.path}/{name} is another user's")
        except BaseException:
            connection.close()
            raise
        return connection

    def remove_stale(self, pid: int, *, own: bool = False) -> None:
        """Removes the socket named ``pid`` if its process has ended. ``own``: the caller has the same number now."""
        if not own and Path(f"/proc/{pid}").exists():  # it may be about to listen
            return
        try:
            self.connect(pid, 0.0).close()
        except ConnectionRefusedError:
            self.remove(pid)
        except OSError:
            return

    def remove(self, name: int | str) -> None:
        """Removes a socket or a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(str(name), dir_fd=self._fd)

    def open(self, name: str) -> int:
        """Returns the descriptor of a file, open for reading and writing; makes it if there is none. The caller closes
        it."""
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._fd)

    @contextlib.contextmanager
    def locked(self, patience_s: float) -> Iterator[None]:
        """Holds the folder's lock.

        Raises TimeoutError if another process does not release it in ``patience_s`` seconds.
        """
        until = monotonic() + patience_s
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if monotonic() >= until:
                    raise TimeoutError(f"another process holds the lock of {self.path}") from None
                sleep(_LOOK_AGAIN_S)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # also for processes that were forked meanwhile

    def files(self) -> list[str]:
        """Returns the names of files, shared or left by killed processes."""
        return [path.name for path in Path(self._path_of("")).iterdir() if path.is_file()]

    def _path_of(self, name: int | str) -> str:
        return f"/proc/self/fd/{self._fd}/{name}"

    def close(self) -> None:
        """Closes the folder. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class SharedFile:
    """A small file in the private folder which several processes map; ``map`` is the mapping.

    The last one to close it removes it; what killed processes have left is removed as another file is opened.
    """

    def __init__(self, name: str, nbytes: int) -> None:
        """``nbytes``: its size, the same for all that map it; zero until written. Raises OSError (FolderRefused) if the
        folder cannot be used."""
        self._name, self._folder = name, PrivateFolder()
        self._fd = -1
        try:
            for left in self._folder.files():
                self._remove_unused(left)
            while self._fd < 0:
                self._fd = self._folder.open(name)
                fcntl.flock(self._fd, fcntl.LOCK_SH)
                if os.fstat(self._fd).st_nlink == 0:  # removed by the last of those that had it, in between
                    self._close_file()
            os.truncate(self._fd, nbytes)
            self.map = mmap.mmap(self._fd, nbytes)
        except BaseException:
            self._close_file()
            self._folder.close()
            raise

    def _remove_unused(self, name: str) -> None:
        fd = self._folder.open(name)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._folder.remove(name)
        except BlockingIOError:
            return
        finally:
            os.close(fd)

    def _close_file(self) -> None:
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # also for forked children, which have the descriptor, too
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Unmaps the file, and removes it if no other process has it."""
        with contextlib.suppress(BufferError):  # an array may still refer to the mapping
            self.map.close()
        self._close_file()
        self._remove_unused(self._name)
        self._folder.close()


def folder_path() -> Path:
    """Returns where the folder is, or is to be."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        with contextlib.suppress(OSError):
            found = os.lstat(runtime)
            if stat.S_ISDIR(found.st_mode) and _is_private(found):
                return Path(runtime, "minato-gpu")
    return Path(tempfile.gettempdir(), f"minato-gpu-{os.getuid()}")


def is_ours(connection: socket.socket) -> bool:
    """Returns whether the process at the other end belongs to the same user, as the kernel says."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(told)[1]) == os.getuid()


def _is_private(found: os.stat_result) -> bool:
    return found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) & 0o077 == 0


def _check(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.getuid():
        raise FolderRefused(f"{path} belongs to another user (uid {found.st_uid})")
    if not _is_private(found):
        raise FolderRefused(f"{path} lets others in (mode {stat.S_IMODE(found.st_mode):04o}); chmod 700 it")
