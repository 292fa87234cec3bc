"""Reads of files on this machine: by threads, into the page cache (page_cache.py) or straight into shared memory.

A thread that is in a system call holds no lock of Python's, so many are under way at once. What they have done is
handed to the event loop together: it is woken once for all that ended meanwhile.

Of small files that go into the page cache a thread takes several: the kernel begins with all of them, and the thread
waits for one after the other. That is 24 µs of CPU for a cold file of 95 KB instead of 40. Where the disk does not give
one, up to seven others wait for it. Rejected: that other threads take those over, which took as much code as all else.
"""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic

from minato_gpu.sources.blocks import IN_PAGE_CACHE, NOWHERE, Blocks
from minato_gpu.sources.disk.filesystem import read_into, read_to_end, tells_size
from minato_gpu.sources.page_cache import PageCache
from minato_gpu.sources.source import Source

_MOST_THREADS = 64
_TOGETHER_S = 1e-3  # what ends while others are under way waits so long for them
_MOST_FILES, _MOST_BYTES = 8, 1 << 20  # that a thread takes at a time

_Task = tuple[int, Source, bool]  # number, source, and whether it goes into the page cache

Ended = tuple[int, float, int, int, BaseException | None]
"""The read's number, the seconds it took, the block, how many bytes, and the error (else None; block is NOWHERE)."""


class FileReads:
    """Reads files in threads.

    ``ended`` is called in the event loop for every read. ``read`` runs in a thread and returns the block of a source
    and the number of its bytes, or raises; without it they come from its file. ``keeps`` returns for a read, by its
    number, whether its bytes may be kept: then they go into a block, else into the page cache, if the file system lets
    workers find them there.
    """

    def __init__(
        self,
        blocks: Blocks,
        ended: Callable[[Ended], None],
        read: Callable[[Source], tuple[int, int]] | None = None,
        keeps: Callable[[int], bool] = lambda number: True,
    ) -> None:
        self._blocks = blocks
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[_Task | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._under_way = 0
        self._together = _MOST_FILES // 2  # files that a thread takes at a time: nothing is known of them yet
        self._done: list[Ended] = []  # not handed over
        self._woken = False  # the event loop has been, for these
        self._lock = threading.Lock()
        self._read, self._keeps, self._page_cache = read or self._read_file, keeps, PageCache()

    def submit(self, number: int, source: Source) -> None:
        """Queues this source behind those submitted before; ``ended`` is called with ``number`` once the
        read has ended."""
        self._under_way += 1
        cached = not self._keeps(number)
        each = self._together if cached else 1
        if self._under_way > len(self._threads) * each:
            self._add_thread()
        self._queue.put((number, source, cached))

    def _add_thread(self) -> None:
        if (count := len(self._threads)) < _MOST_THREADS:
            self._threads.append(threading.Thread(target=self._work, daemon=True, name=f"minato-read-{count}"))
            self._threads[-1].start()

    def close(self) -> None:
        """Has the threads end after the reads that are queued; does not wait for them."""
        for _ in self._threads:
            self._queue.put(None)

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                for each, file in self._begun(self._with_others(task)):
                    self._do(*each, file)
            except RuntimeError:  # the event loop has been closed
                return

    def _with_others(self, first: _Task) -> list[_Task]:
        """Returns the tasks that a thread reads together: ``first`` and, if that goes into the page cache, queued
        others."""
        found = [first]
        while first[2] and len(found) < self._together and not self._queue.empty():
            try:
                task = self._queue.get_nowait()
            except Empty:
                break
            if task is None:  # for another thread, or the end of this one
                self._queue.put(None)
                break
            found.append(task)
        return found

    def _begun(self, tasks: list[_Task]) -> list[tuple[_Task, int]]:
        """Returns what the thread is to read, each with its file if that is open.

        What is no file that the kernel can begin with (a pipe, a missing one) may never come: another thread reads it
        by itself.
        """
        found = []
        for number, source, cached in tasks:
            file = _begun(source) if cached else -1
            if cached and file < 0:
                self._queue.put((number, source, False))
                self._loop.call_soon_threadsafe(self._add_thread)
            else:
                found.append(((number, source, cached), file))
        return found

    def _do(self, number: int, source: Source, cached: bool, file: int) -> None:
        """Reads a source, ``cached``: into the page cache. ``file`` is its open descriptor, or -1."""
        begin = monotonic()
        try:
            block, nbytes = self._read(source) if file < 0 else self._read_open(file, source, cached)
            ended: Ended = number, monotonic() - begin, block, nbytes, None
        except BaseException as error:
            ended = number, monotonic() - begin, NOWHERE, 0, error
        with self._lock:
            self._done.append(ended)
            is_last = len(self._done) >= self._under_way
            wakes, self._woken = is_last or not self._woken, True
        if wakes:
            self._loop.call_soon_threadsafe(self._hand_over if is_last else self._hand_over_soon)

    def _hand_over_soon(self) -> None:
        self._loop.call_later(_TOGETHER_S, self._hand_over)

    def _hand_over(self) -> None:
        with self._lock:
            done, self._done, self._woken = self._done, [], False
        self._under_way -= len(done)
        for each in done:
            _, _, block, nbytes, _ = each
            self._together = min(_MOST_FILES, max(1, _MOST_BYTES // max(nbytes, 1))) if block == IN_PAGE_CACHE else 1
            self._ended(each)

    # --- in a thread -----------------------------------------------------------------------------------------

    def _read_file(self, source: Source) -> tuple[int, int]:
        return self._read_open(os.open(source.file, os.O_RDONLY | os.O_CLOEXEC), source, False)

    def _read_open(self, file: int, source: Source, cached: bool) -> tuple[int, int]:
        try:
            if cached:
                brought = self._page_cache.bring_in(file, source)
                if brought is not None:
                    return IN_PAGE_CACHE, brought
            return self._into_block(file, source)
        finally:
            os.close(file)

    def _into_block(self, file: int, source: Source) -> tuple[int, int]:
        nbytes = source.length
        if nbytes is None:
            found = os.fstat(file)
            if not tells_size(found):
                data = read_to_end(file, source.offset)
                block, view = self._blocks.allocate(len(data))
                view[:] = data
                return block, len(data)
            nbytes = found.st_size - source.offset
        if nbytes < 0:
            raise EOFError(f"{source} begins {-nbytes} bytes after the end")
        block, view = self._blocks.allocate(nbytes)
        try:
            count = read_into(file, view, source.offset)
            if count < nbytes:
                raise EOFError(f"{source} ends {nbytes - count} bytes too early")
        except BaseException:
            self._blocks.free(block)
            raise
        return block, nbytes


def _begun(source: Source) -> int:
    """Opens a file and has the kernel begin to read it. Returns the descriptor, for the caller to close; -1 for what is
    no regular file, or cannot be opened."""
    try:
        if not stat.S_ISREG(Path(source.file).stat().st_mode):  # to open a pipe is noticed at its other end
            return -1
        file = os.open(source.file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return -1
    with suppress(OSError):
        os.posix_fadvise(file, source.offset, source.length or _MOST_BYTES, os.POSIX_FADV_WILLNEED)
    return file
