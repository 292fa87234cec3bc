"""The directory of a tier: made or taken as it is, and refused where bytes would not be safe in it.

    format      what this is, and the number of its format
    gate        held by the one process that is about to open the directory
    lock        shared by all that have it open
    owner       held by the one process that removes copies to make room
    index/      LMDB
    segments/   files of entries' bytes

Who comes through the gate and finds nobody's lock repairs what earlier runs have left; who finds one finds a
directory that has been repaired, since locks are taken behind the gate only. Both are flocks, which end with their
process, however it ends. All files are the user's alone (0700).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minato_gpu.notices import LOGGER
from minato_gpu.sources.disk.files import OpenFile
from minato_gpu.sources.disk.filesystem import remote_kind
from minato_gpu.sources.disk.index import RENEWED, renew

_FORMAT = 1
_NAME = "minato-gpu cache, format "
_OURS = {"format", "format.new", "gate", "lock", "owner", "index", "segments", "lost+found"}
_LEAST_BLOCK = 4096


class CacheDirectoryError(Exception):
    """The directory cannot be used as it is; the message says what to do."""


class Directory:
    """An open directory. ``alone``: no other process has it open, and none comes, until ``enter`` has been called.

    ``make``: it may be new. Raises CacheDirectoryError; OSError where the disk fails.
    """

    def __init__(self, path: Path, make: bool) -> None:
        self.path = Path(path).expanduser().absolute()
        try:
            _admit(self.path, make)
            names = ("gate", "lock", "owner")
            self._gate, self._lock, self._owner = (OpenFile(_lock_file(self.path / name)) for name in names)
            try:
                self.alone = self._come_in()
                self.segments = OpenFile(os.open(self.path / "segments", os.O_RDONLY | os.O_DIRECTORY))
            except BaseException:
                self._gate.close()
                self._lock.close()
                self._owner.close()
                raise
        except OSError as error:
            raise CacheDirectoryError(f"{self.path} cannot be used for a cache: {error.strerror}") from error
        self.block = max(os.statvfs(self.path).f_frsize, _LEAST_BLOCK)

    @property
    def index(self) -> Path:
        """The folder of the index."""
        return self.path / "index"

    def need_room(self, budget: int, held: int) -> None:
        """Raise CacheDirectoryError where the disk has not room for ``budget`` bytes, of which it holds ``held``."""
        disk = os.statvfs(self.path)
        free = disk.f_bavail * disk.f_frsize
        if budget > free + held:
            raise CacheDirectoryError(
                f"a cache of {budget:,} bytes does not fit on the disk of {self.path}: {free:,} bytes are free, and "
                f"the cache holds {held:,}"
            )

    def enter(self) -> None:
        """Hold it together with others from now on, and let the next one come."""
        fcntl.flock(self._lock.fd, fcntl.LOCK_SH)
        self._gate.close()

    @contextmanager
    def owned(self) -> Iterator[bool]:
        """Be the one process that removes copies to make room, if no other is; a holder that dies is none any more."""
        owned = _is_free(self._owner.fd)
        try:
            yield owned
        finally:
            if owned:
                fcntl.flock(self._owner.fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of it; in a fork's copy, of that copy only."""
        self.segments.close()
        self._lock.close()
        self._gate.close()
        self._owner.close()

    def _come_in(self) -> bool:
        fcntl.flock(self._gate.fd, fcntl.LOCK_EX)
        alone = _is_free(self._lock.fd)
        if alone:
            self._prepare()
        return alone

    def _prepare(self) -> None:
        if not (self.path / "format").exists():
            new = self.path / "format.new"
            new.touch(mode=0o600)
            new.write_text(f"{_NAME}{_FORMAT}\n", encoding="utf-8")
            new.rename(self.path / "format")
        if (self.index / "data.mdb").exists() and not renew(self.index):
            LOGGER.warning("the index of the cache in %s is damaged: the cache begins anew, empty", self.path)
            shutil.rmtree(self.path / "segments", ignore_errors=True)
            shutil.rmtree(self.index)
        (self.path / "index").mkdir(mode=0o700, exist_ok=True)
        (self.path / "segments").mkdir(mode=0o700, exist_ok=True)


def wipe(path: Path) -> bool:
    """Delete all that makes ``path`` a cache, whatever its format and state. False where a process has it open."""
    if not _format(path):
        raise CacheDirectoryError(f"{path} is no cache of this package")
    gate, lock = (OpenFile(_lock_file(path / name)) for name in ("gate", "lock"))  # released with this function
    fcntl.flock(gate.fd, fcntl.LOCK_EX)
    if not _is_free(lock.fd):
        return False
    for folder in (path / "segments", path / "index", *path.glob(f"{RENEWED}*")):
        shutil.rmtree(folder, ignore_errors=True)
    (path / "format").unlink()
    return True


def _lock_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _is_free(fd: int) -> bool:
    """Whether nobody else has locked it; then this process has."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _admit(path: Path, make: bool) -> None:
    """Make the directory where there is none, and refuse what is not safe."""
    found = _format(path) if path.is_dir() else ""
    if not found and not make:
        raise CacheDirectoryError(f"{path} is no cache of this package")
    if path.exists() and not path.is_dir():
        raise CacheDirectoryError(f"{path} is a file; a cache needs a directory")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    kind = remote_kind(path)
    if kind is not None:
        raise CacheDirectoryError(
            f"{path} is on {kind}, a network file system, on which processes of several machines would spoil the "
            f"index; give a directory on a disk of this machine"
        )
    if found and found != str(_FORMAT):
        raise CacheDirectoryError(
            f"the cache in {path} has format {found}, this version of minato-gpu has {_FORMAT}; give another "
            f"directory, or empty it with: minato-gpu cache {path} --empty"
        )
    others = {file.name for file in path.iterdir() if not file.name.startswith(RENEWED)} - _OURS
    if not found and others:
        raise CacheDirectoryError(
            f"{path} has files that are no cache's ({min(others)}, for one); give a directory of its own"
        )
    _make_private(path, bool(found))


def _make_private(path: Path, is_cache: bool) -> None:
    state = path.stat()
    if state.st_uid != os.geteuid():
        raise CacheDirectoryError(
            f"{path} belongs to another user (id {state.st_uid}, this process has {os.geteuid()}), whose files would "
            f"be trusted; give a directory of your own"
        )
    mode = stat.S_IMODE(state.st_mode)
    if is_cache and mode & 0o022:
        raise CacheDirectoryError(
            f"others may write to {path} (mode {mode:o}), so what is in it may be anyone's; empty it "
            f"(minato-gpu cache {path} --empty), then chmod 700 {path}"
        )
    if mode & 0o077:
        path.chmod(0o700)


def _format(path: Path) -> str:
    """The number in the directory's format file; empty where it has none."""
    try:
        text = (path / "format").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    return text.removeprefix(_NAME).strip() or "?" if text.startswith(_NAME) else ""
