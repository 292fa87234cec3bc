"""The index: which copies there are and where, for all processes that share the directory. An LMDB environment.

LMDB is written without fsync. A process that is killed loses nothing, since what it has written is the kernel's. When
the machine loses power, the latest records may be lost, or the whole index be damaged: whoever opens the directory
next has it checked (rebuild.py) and begins anew where it must. Either is a miss.

Who writes holds a lock of the kernel's (flock) around LMDB's own, for which then nobody waits. LMDB's is a robust mutex
in shared memory: who unlocks it wakes one of those that wait. If that one is killed before it runs, and another has
come in between, nobody wakes the rest, and they sleep until somebody waits again. The kernel wakes all that wait for a
lock of its own.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar, cast

import lmdb

from minato_gpu.memory import address_space
from minato_gpu.sources.disk import rebuild
from minato_gpu.sources.disk.files import OpenFile
from minato_gpu.sources.disk.records import Entry, Record, Run, Segment, Total, seal, unseal

R = TypeVar("R", bound=Record)

_MAP_BYTES = 8 << 30  # of address space, for some 30 million entries; the file is as large as what it holds
_MOST_READERS = 1024  # at a time, of all processes
_KEPT = 64  # readers that a process has made and keeps: to make one takes a mutex that all processes share
_PAGE_HEADROOM = 64
_RENEW_S = 300.0
_AT_A_TIME = 4096
RENEWED = "index-renewed-"  # how folders beside the index begin in which it is being written anew


class Table(Generic[R]):
    """One of the index's tables: records of one kind, within a transaction. Methods raise DamagedIndexError."""

    def __init__(self, environment: lmdb.Environment, name: bytes, kind: type[R]) -> None:
        self._database = environment.open_db(name)
        self._unpack = kind.unpack

    def get(self, transaction: lmdb.Transaction, key: bytes) -> R | None:
        """The record of this key."""
        value = cast("bytes | None", transaction.get(key, db=self._database))
        return None if value is None else self._unpack(key, unseal(key, value))

    def put(self, transaction: lmdb.Transaction, record: R) -> None:
        """Store it, in the place of what there was."""
        transaction.put(record.key, seal(record.key, record.pack()), db=self._database)

    def pop(self, transaction: lmdb.Transaction, key: bytes) -> None:
        """Take it out."""
        transaction.delete(key, db=self._database)

    def items(self, transaction: lmdb.Transaction, least: bytes = b"") -> Iterator[R]:
        """All, by key, from ``least`` on."""
        cursor = transaction.cursor(self._database)
        if cursor.set_range(least):
            for key, value in cast("Iterator[tuple[bytes, bytes]]", iter(cursor)):
                yield self._unpack(key, unseal(key, value))

    def count(self, transaction: lmdb.Transaction) -> int:
        """How many there are."""
        return int(transaction.stat(self._database)["entries"])


class Index:
    """Entries, accounts of segments, totals, and who reads. ``path`` is a folder of its own.

    May be used by several threads, not across a fork. Methods raise lmdb.Error where the disk fails, and
    DamagedIndexError.
    """

    def __init__(self, path: Path) -> None:
        self._folder = OpenFile(os.open(path, os.O_RDONLY | os.O_DIRECTORY))  # its lock: whose turn it is to write
        self._writing = threading.Lock()  # of one process, the same
        self._environment = lmdb.open(
            os.fspath(path),
            map_size=address_space.share(_MAP_BYTES),
            max_dbs=8,
            max_readers=_MOST_READERS,
            max_spare_txns=_KEPT,
            mode=0o600,
            sync=False,
            readahead=False,
        )
        with self._turn():
            self._environment.reader_check()  # slots of the dead
            self.entries = Table(self._environment, b"entries", Entry)
            self.segments = Table(self._environment, b"segments", Segment)
            self.totals = Table(self._environment, b"totals", Total)
            self.runs = Table(self._environment, b"runs", Run)
        self._page_bytes = int(self._environment.stat()["psize"])

    def find(self, key: bytes) -> Entry | None:
        """The entry of ``key``, if there is one."""
        transaction = self._environment.begin()  # as a context it takes twice as long, and this is asked for every hit
        try:
            return self.entries.get(transaction, key)
        finally:
            transaction.abort()

    def all_entries(self) -> Iterator[Entry]:
        """Every entry, by key. One that comes or goes meanwhile may be among them or not."""
        after = b""
        while True:
            with self._environment.begin() as transaction:
                chunk = list(islice(self.entries.items(transaction, after), _AT_A_TIME))
            yield from chunk
            if len(chunk) < _AT_A_TIME:
                return
            after = chunk[-1].key + b"\0"

    def count(self) -> int:
        """How many entries there are."""
        with self._environment.begin() as transaction:
            return self.entries.count(transaction)

    def nbytes(self) -> int:
        """What the index takes on disk."""
        return (int(self._environment.info()["last_pgno"]) + 1) * self._page_bytes

    @property
    def headroom(self) -> int:
        """What transactions may add to it before its size is looked at again."""
        return _PAGE_HEADROOM * self._page_bytes

    def read(self) -> lmdb.Transaction:
        """A view of the index at one moment, as a context; short, because nothing that it sees can be reused."""
        return self._environment.begin()

    @contextmanager
    def write(self) -> Iterator[lmdb.Transaction]:
        """A transaction: all of it or, where it raises, nothing; one at a time among all processes."""
        with self._turn(), self._environment.begin(write=True) as transaction:
            yield transaction

    def close(self) -> None:
        """Hand the index to the disk and let go of it."""
        self._environment.sync(True)
        with self._writing:
            self._environment.close()
            self._folder.close()

    def forked(self) -> None:
        """In a fork's copy: the lock is the parent's."""
        self._folder.close()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self._writing:
            if self._folder.fd < 0:
                raise lmdb.Error("the index has been closed")
            fcntl.flock(self._folder.fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._folder.fd, fcntl.LOCK_UN)


def renew(path: Path) -> bool:
    """Write the index at ``path`` anew, before the first process opens it; False where it is damaged (see
    rebuild.py).
    """
    for left in path.parent.glob(f"{RENEWED}*"):
        shutil.rmtree(left, ignore_errors=True)
    new = Path(tempfile.mkdtemp(dir=path.parent, prefix=RENEWED))  # no other's: a child may outlive who started it
    packages = str(Path(lmdb.__file__).parent.parent)
    script = [rebuild.__file__, os.fspath(path), os.fspath(new), str(address_space.share(_MAP_BYTES)), packages]
    try:
        code = subprocess.run(
            [sys.executable, "-I", "-S", *script], capture_output=True, timeout=_RENEW_S, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return False
    (path / "lock.mdb").unlink(missing_ok=True)  # of processes that are all gone
    if code == 0 and (new / "data.mdb").exists():
        (new / "data.mdb").replace(path / "data.mdb")
    shutil.rmtree(new, ignore_errors=True)
    return code in (0, rebuild.NO_ROOM)
