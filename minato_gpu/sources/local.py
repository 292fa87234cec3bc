"""Reads of files on this machine: by threads, straight into shared memory, or into the page cache (page_cache.py).

A thread that is in a system call holds no lock of Python's, so many are under way at once. What they have done is
handed to the event loop together: it is woken once for all that ended meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from time import monotonic

from minato_gpu.sources.blocks import IN_PAGE_CACHE, NOWHERE, Blocks
from minato_gpu.sources.disk.filesystem import Uncached, cached_bytes
from minato_gpu.sources.page_cache import PageCache
from minato_gpu.sources.placing import Cached, Where
from minato_gpu.sources.source import Source

_MOST_THREADS = 64
_OPEN = 64  # files that stay open, because parts of them are read

Ended = tuple[int, float, int, int, BaseException | None]
"""Number, seconds, block, bytes, or the error."""


class LocalReads:
    """``ended`` is called in the event loop for every read. ``read``, in a thread: block and bytes of a source; else
    they come from its file. ``where``: to where a read, by its number, is to go; the page cache is that where the file
    system is such that workers find them there. ``cached`` is told what it has of files that are read past it."""

    def __init__(
        self,
        blocks: Blocks,
        ended: Callable[[Ended], None],
        read: Callable[[Source, Where], tuple[int, int]] | None = None,
        *,
        where: Callable[[int], Where] = lambda _: Where.BLOCK,
        cached: Cached | None = None,
    ) -> None:
        self._blocks = blocks
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[tuple[int, Source, Where] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._under_way = 0
        self._done: list[Ended] = []  # not told
        self._lock = threading.Lock()
        self._files = _OpenFiles()
        self._read = read or self._read_file
        self._where, self._cached = where, cached
        self._page_cache, self._uncached = PageCache(), Uncached()

    def submit(self, number: int, source: Source) -> None:
        """Read this next."""
        self._under_way += 1
        if self._under_way > len(self._threads) < _MOST_THREADS:
            thread = threading.Thread(target=self._work, daemon=True, name=f"minato-read-{len(self._threads)}")
            self._threads.append(thread)
            thread.start()
        self._queue.put((number, source, self._where(number)))

    def close(self) -> None:
        """Let the threads end, without waiting for what storage does not answer."""
        for _ in self._threads:
            self._queue.put(None)

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            number, source, where = task
            begin = monotonic()
            try:
                block, nbytes = self._read(source, where)
                ended: Ended = number, monotonic() - begin, block, nbytes, None
            except BaseException as error:
                ended = number, monotonic() - begin, NOWHERE, 0, error
            with self._lock:
                self._done.append(ended)
                first = len(self._done) == 1
            if first:
                try:
                    self._loop.call_soon_threadsafe(self._take)
                except RuntimeError:  # the loop has been closed
                    return

    def _take(self) -> None:
        with self._lock:
            done, self._done = self._done, []
        self._under_way -= len(done)
        for each in done:
            self._ended(each)

    def _read_file(self, source: Source, where: Where) -> tuple[int, int]:
        path = source.path.removeprefix("file://")
        if source.length is None:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return self._read_open(file, source, where)
            finally:
                os.close(file)
        with self._files.borrowed(path) as file:
            return self._read_open(file, source, where)

    def _read_open(self, file: int, source: Source, where: Where) -> tuple[int, int]:
        if where is Where.PAGE_CACHE:
            brought = self._page_cache.bring_in(file, source)
            if brought is not None:
                return IN_PAGE_CACHE, brought
        length = source.length
        nbytes = os.fstat(file).st_size - source.offset if length is None else length
        if where is Where.UNCACHED and self._cached is not None and self._cached.is_wanted:
            self._cached.add(nbytes, cached_bytes(file, source.offset, nbytes))
        return self._fill(file, source, nbytes, where)

    def _fill(self, file: int, source: Source, nbytes: int, where: Where) -> tuple[int, int]:
        if nbytes < 0:
            raise EOFError(f"{source} begins {-nbytes} bytes after the end")
        block, view = self._blocks.allocate(nbytes)
        try:
            at = 0
            while at < nbytes:
                if where is Where.UNCACHED:
                    read = self._uncached.read(file, view[at:], source.offset + at)
                else:
                    read = os.preadv(file, [view[at:]], source.offset + at)
                if not read:
                    raise EOFError(f"{source} ends {nbytes - at} bytes too early")
                at += read
        except BaseException:
            self._blocks.free(block)
            raise
        return block, nbytes


class _OpenFiles:
    """Files of which parts are read, such as shards: they stay open, the most recent ones, while they are the same."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[str, _File] = OrderedDict()

    def borrowed(self, path: str) -> _File:
        """The file, open; to be used as a context."""
        found = Path(path).stat()
        version = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        with self._lock:
            file = self._files.get(path)
            if file is not None and file.version == version:
                self._files.move_to_end(path)
                file.users += 1
                return file
        opened = _File(os.open(path, os.O_RDONLY | os.O_CLOEXEC), version, self._lock)  # which may take its time
        with self._lock:
            before = self._files.pop(path, None)
            if before is not None:
                before.leave()
            self._files[path] = opened
            opened.users += 1
            while len(self._files) > _OPEN:
                self._files.popitem(last=False)[1].leave()
        return opened


class _File:
    """An open file; closed by the last who leaves it. Its count is changed with the lock of all files held."""

    def __init__(self, descriptor: int, version: tuple[int, ...], lock: threading.Lock) -> None:
        self.version = version
        self.users = 1
        self._descriptor = descriptor
        self._lock = lock

    def __enter__(self) -> int:
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.leave()

    def leave(self) -> None:
        """One fewer uses it."""
        self.users -= 1
        if not self.users:
            os.close(self._descriptor)
