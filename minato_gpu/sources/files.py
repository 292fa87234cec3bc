"""Reads of files on this machine: by threads, into the page cache (page_cache.py) or straight into shared memory.

A thread that is in a system call holds no lock of Python's, so many are under way at once. What they have done is
handed to the event loop together: it is woken once for all that ended meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic

from minato_gpu.sources.blocks import IN_PAGE_CACHE, NOWHERE, Blocks
from minato_gpu.sources.disk.filesystem import read_into, read_to_end, tells_size
from minato_gpu.sources.page_cache import PageCache
from minato_gpu.sources.source import Source

_MOST_THREADS = 64
_TOGETHER_S = 1e-3  # what ends while others are under way waits so long for them

_Task = tuple[int, Source, bool]  # number, source, and whether its bytes may be kept

Ended = tuple[int, float, int, int, BaseException | None]
"""Number, seconds, block, bytes, or the error."""


class FileReads:
    """Reads files in threads.

    ``ended`` is called in the event loop for every read. ``read`` runs in a thread and returns block and bytes of a
    source; without it they come from its file. ``keeps`` returns for a read, by its number, whether its bytes may be
    kept: then they go into a block, else into the page cache, if the file system lets workers find them there.
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
        self._done: list[Ended] = []  # not handed over
        self._woken = False  # the event loop has been, for these
        self._lock = threading.Lock()
        self._read, self._keeps, self._page_cache = read, keeps, PageCache()

    def submit(self, number: int, source: Source) -> None:
        """Reads this source next."""
        self._under_way += 1
        if len(self._threads) < min(self._under_way, _MOST_THREADS):
            thread = threading.Thread(target=self._work, daemon=True, name=f"minato-read-{len(self._threads)}")
            self._threads.append(thread)
            thread.start()
        self._queue.put((number, source, self._keeps(number)))

    def close(self) -> None:
        """Ends the threads, without waiting for what storage does not answer."""
        for _ in self._threads:
            self._queue.put(None)

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                self._do(*task)
            except RuntimeError:  # the event loop has been closed
                return

    def _do(self, number: int, source: Source, keeps: bool) -> None:
        begin = monotonic()
        try:
            block, nbytes = self._read(source) if self._read is not None else self._read_file(source, keeps)
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
            self._ended(each)

    # --- in a thread -----------------------------------------------------------------------------------------

    def _read_file(self, source: Source, keeps: bool) -> tuple[int, int]:
        file = os.open(source.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            brought = None if keeps else self._page_cache.bring_in(file, source)
            return self._into_block(file, source) if brought is None else (IN_PAGE_CACHE, brought)
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
