"""The directory of a cache: made or taken as it is, and refused where copies would not be safe in it.

    format     names this package, and the number of the format
    account    bytes and copies; its lock is held for every change (account.py)
    runs/      a directory for each run that has the cache open (runs.py)
    00/ - ff/  a file for each copy (entry.py), by the first two digits of its key

Everything is the user's alone (0700).
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from minato_gpu.sources.disk.filesystem import OpenFile, remote_kind
from minato_gpu.sources.disk.runs import find_runs

_FORMAT = "2"
_NAME = "minato-gpu cache, format "


class CacheDirectoryError(Exception):
    """The directory cannot be used as it is; the message says what to do."""


def open_directory(path: Path, make: bool) -> OpenFile:
    """Opens a cache's directory, an absolute ``path``, and takes other users' rights to it away; with ``make``, creates
    it if need be.

    Raises CacheDirectoryError if there is no cache, or copies would not be safe in it.
    """
    try:
        _admit(path, make)
        return OpenFile(_opened(path))
    except OSError as error:
        raise CacheDirectoryError(f"{path} cannot be used for a cache: {error.strerror}") from error


def need_room(path: Path, budget: int, held: int) -> None:
    """Raises CacheDirectoryError if a ``budget`` is more than the bytes that are free on the disk and those that the
    cache holds already (``held``) together."""
    disk = os.statvfs(path)
    free = disk.f_bavail * disk.f_frsize
    if budget > free + held:
        raise CacheDirectoryError(
            f"a cache of {budget:,} bytes does not fit on the disk of {path}: {free:,} bytes are free, and the cache "
            f"holds {held:,}"
        )


def wipe(path: Path) -> bool:
    """Deletes the cache in ``path``. Returns False, with nothing done, where a process has it open.

    Raises CacheDirectoryError if it is no cache.
    """
    if not _format(path):
        raise CacheDirectoryError(f"{path} is no cache of this package")
    root = OpenFile(_opened(path))
    if find_runs(root.fd)[0]:
        return False
    for file in path.iterdir():
        if file.name == "runs" or len(file.name) == 2:
            shutil.rmtree(file, ignore_errors=True)
    (path / "account").unlink(missing_ok=True)
    (path / "format").unlink()
    return True


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _admit(path: Path, make: bool) -> None:
    """Makes the directory where there is none, and refuses what is not safe."""
    found = _format(path) if path.is_dir() else ""
    if not found and not make:
        raise CacheDirectoryError(f"{path} is no cache of this package")
    if path.exists() and not path.is_dir():
        raise CacheDirectoryError(f"{path} is a file; a cache needs a directory")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    kind = remote_kind(path)
    if kind is not None:
        raise CacheDirectoryError(
            f"{path} is on {kind}, a network file system, on which the locks of several machines would not hold; give "
            f"a directory on a disk of this machine"
        )
    if found and found != _FORMAT:
        raise CacheDirectoryError(
            f"the cache in {path} has format {found}, this version of minato-gpu has {_FORMAT}; give another "
            "directory, or delete it"
        )
    others = {file.name for file in path.iterdir() if not file.name.startswith("format.")} - {"lost+found"}
    found = found or _format(path)  # another process may have made it meanwhile
    if not found and others:
        raise CacheDirectoryError(
            f"{path} has files that are no cache's ({min(others)}, for one); give a directory of its own"
        )
    _make_private(path, bool(found))
    if not found:
        new = path / f"format.{os.getpid()}"
        new.touch(mode=0o600)
        new.write_text(f"{_NAME}{_FORMAT}\n", encoding="utf-8")
        new.rename(path / "format")


def _make_private(path: Path, is_cache: bool) -> None:
    """Takes other users' rights away; refuses what others own or could write to."""
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
    """Returns the format number in the directory's format file.

    "" if it has none of this package; "?" if that holds no number.
    """
    try:
        text = (path / "format").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    return text.removeprefix(_NAME).strip() or "?" if text.startswith(_NAME) else ""
