"""A cache on disk before the reader pool: what has a copy there is read from it, and all else from its source.

The cache is looked into by threads, as files are. It keeps what comes first, until its budget is full: then what is new
passes by (CoorDL's MinIO cache, see caching/policy.py), unless there are copies that nobody uses any more, which make
room (disk/account.py). So the processes that share a directory need not agree on anything: each hits what any of them
has kept. Where a run has a directory alone, reads a part of each epoch, and knows which, a copy goes as it is used if
it is not needed soon, and what is not needed soon is not written (disk_retention.py).
"""

from __future__ import annotations

import os
from asyncio import AbstractEventLoop, CancelledError, get_running_loop
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any

from minato_gpu.sources.blocks import NOWHERE, Blocks
from minato_gpu.sources.disk.tier import DiskTier
from minato_gpu.sources.disk_retention import DiskRetention
from minato_gpu.sources.files import Ended, FileReads
from minato_gpu.sources.memory_tier import Begun
from minato_gpu.sources.pool import Reads
from minato_gpu.sources.source import Key, Source

_WRITES_AHEAD = 64 << 20  # bytes that wait to be written, at most: what comes then is kept in another epoch
_EMPTY = b"0 "  # how the version of a file begins that says that it has no bytes
_FULL_FOR = 4096  # reads after which a tier that was full is asked again: copies may have been removed


class _Missing(Exception):
    """There is no copy of this version; None: the source's file cannot be looked at."""

    def __init__(self, version: bytes | None) -> None:
        super().__init__()
        self.version = version


class DiskPool:
    """Reads copies on disk, and has ``pool`` read what has none. ``following`` decides what stays.

    It puts a function of its own in the place of ``pool.done``, and reports every source to the one that was there.
    """

    def __init__(self, tier: DiskTier, blocks: Blocks, pool: Reads, following: DiskRetention) -> None:
        self._tier, self._blocks, self.following = tier, blocks, following
        self._loop: AbstractEventLoop = get_running_loop()
        self._pool, self._done, pool.done = pool, pool.done, self._was_read
        self._reads = FileReads(blocks, self._looked, self._read)
        self._writer = ThreadPoolExecutor(1, "minato-write")
        self._looking: dict[int, Source] = {}
        self._cancelled: set[int] = set()  # of those
        self._versions: dict[int, bytes | None] = {}  # of what has no copy and is being read, from before it was
        self._waiting = 0  # bytes to be written
        self._passes = 0  # writes that are not tried, as the tier is full
        self._epoch = 0  # how many have begun
        self._going: deque[bytes] = deque()  # names of copies that are not needed soon

    def begin(self, begun: Begun) -> None:
        """Begins an epoch: decides anew what stays, tries to write again if the tier was full, and has the writer's
        thread begin it in the tier."""
        self._passes = 0
        self._epoch += 1
        self.following.begin(begun, self._tier.is_alone(), self._tier.room())
        self._writer.submit(self._tier.begin_epoch)

    # --- reading ---------------------------------------------------------------------------------------------

    def submit(self, number: int, source: Source) -> None:
        self._looking[number] = source
        self._reads.submit(number, source)

    def cancel(self, number: int) -> None:
        if number in self._looking:
            self._cancelled.add(number)
        else:
            self._pool.cancel(number)

    def _read(self, source: Source) -> tuple[int, int]:
        """Returns the block that holds the copy, and the number of its bytes. Raises _Missing. Runs in a thread."""
        try:
            version = version_of(source)
        except OSError:
            raise _Missing(None) from None  # who reads it finds that out, too
        block = NOWHERE

        def allocate(nbytes: int) -> memoryview:
            nonlocal block
            block, view = self._blocks.allocate(nbytes)
            return view

        nbytes = self._tier.read(tier_key(source.key), version, allocate)
        if nbytes is None:
            if block != NOWHERE:
                self._blocks.free(block)
            raise _Missing(version)
        return block, nbytes

    def _looked(self, ended: Ended) -> None:
        number, _, block, nbytes, error = ended
        source, cancelled = self._looking.pop(number), number in self._cancelled
        self._cancelled.discard(number)
        if error is None:
            self.following.read(nbytes)
            self._done(number, block, nbytes, None, on_disk=True)
        elif cancelled:
            self._done(number, -1, 0, CancelledError())
        else:
            self._versions[number] = error.version if isinstance(error, _Missing) else None
            self._pool.submit(number, source)

    def _was_read(self, number: int, block: int, nbytes: int, error: BaseException | None) -> None:
        version = self._versions.pop(number)
        if error is None:
            self.following.read(nbytes)
            if version is not None and version.startswith(_EMPTY) and nbytes:
                version = None  # it does not tell its size, so its time does not tell either what is in it
        self._done(number, block, nbytes, error, version=version)

    # --- writing ---------------------------------------------------------------------------------------------

    def write(self, key: Key, version: bytes, block: int, nbytes: int, written: Callable[[], None]) -> bool:
        """Has a copy of the block written, and ``written`` called in the event loop after that, kept or not.

        Returns False, and calls nothing, if it is not tried: the tier was full, or too many bytes wait to be written.
        """
        if self._passes:
            self._passes -= 1
            return False
        if self._waiting and self._waiting + nbytes > _WRITES_AHEAD:
            return False
        self._waiting += nbytes
        epoch = self._epoch

        def ended(kept: bool) -> None:
            self._waiting -= nbytes
            if epoch == self._epoch:  # else there may be room since
                self._passes = 0 if kept else _FULL_FOR
            written()

        def work() -> None:
            kept = False
            try:
                self._make_go()  # first: there may be no room else
                kept = self._tier.write(tier_key(key), version, self._blocks.view(block, nbytes))
            finally:
                self._loop.call_soon_threadsafe(ended, kept)

        self._writer.submit(work)
        return True

    # --- what stays ------------------------------------------------------------------------------------------

    def let_go(self, key: Key) -> None:
        """Has the copy of a used source removed, if ``DiskTier.let_go`` does so; many are removed together, as soon as
        the writer comes to it."""
        self._going.append(tier_key(key))
        self._writer.submit(self._make_go)

    def _make_go(self) -> None:
        """Removes copies of used sources. Runs in the writer's thread."""
        names = [self._going.popleft() for _ in range(len(self._going))]
        if names:
            self._tier.let_go(names)
            self._loop.call_soon_threadsafe(self._have_gone)

    def _have_gone(self) -> None:
        self._passes = 0  # there is room since

    # --- the rest --------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, Any]:
        """Returns what the directory holds, and what came of this process's reads and writes."""
        return self._tier.stats() | {"why": self.following.why}

    def finish(self) -> None:
        """Waits until all queued writes and removals are done. The pool is of no use after that."""
        self._reads.close()
        self._writer.submit(self._make_go)
        self._writer.shutdown()


def tier_key(key: Key) -> bytes:
    """Returns a source's key in the tier, 16 bytes: the same for every process and run, wherever it was started, and
    for all versions of its bytes."""
    path, offset, length = key[:3]
    return blake2b(f"{path}\0{offset}\0{length}".encode("utf-8", "surrogateescape"), digest_size=16).digest()


def version_of(source: Source) -> bytes:
    """Returns the version of a source's bytes: a file's size and time, and the version that is declared.

    Raises OSError if there is no such file.

    Of a URL only what is declared is known (b"": nothing) without asking the storage each time: what is there is taken
    to stay as it is.
    """
    declared = _short(source.version) if source.version else b""
    if source.is_remote:
        return declared
    found = os.stat(source.file)  # noqa: PTH116  # a Path takes three times as long
    return b"%d %d%s" % (found.st_size, found.st_mtime_ns, declared)


def _short(version: str) -> bytes:
    data = version.encode("utf-8", "surrogateescape")
    return data if len(data) < 64 else blake2b(data, digest_size=16).digest()
