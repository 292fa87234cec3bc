"""Reads of files on this machine: by threads, straight into shared memory, or into the page cache (page_cache.py).

A thread that is in a system call holds no lock of Python's, so many are under way at once. What they have done is
handed to the event loop together: it is woken once for all that ended meanwhile.

Of small files that go into the page cache a thread takes several together: it has the kernel begin with all of them,
and then waits for one after the other. So as many are under way with fewer threads, which would wake each other with
every call (measured, 95 KB cold: 24 µs of CPU for each file instead of 40, and as many a second). Where one does not
come, another thread takes over the others.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic

from minato_gpu.sources.blocks import IN_PAGE_CACHE, NOWHERE, Blocks
from minato_gpu.sources.disk.filesystem import OpenFile, Uncached, cached_bytes, read_into, read_to_end, tells_size
from minato_gpu.sources.page_cache import PageCache
from minato_gpu.sources.placing import Placing, Where
from minato_gpu.sources.source import Source

_MOST_THREADS = 64
_TOGETHER, _TOGETHER_BYTES = 8, 1 << 20  # so many files, at most, and about so many bytes
_TELL_S = 2e-3  # what has come waits no longer for others, to be told together
_STUCK_S = 0.1  # nothing has come for so long: another thread takes over what is held
_OPEN = 64  # files that stay open, because parts of them are read


_Task = tuple[int, Source, Where]

Ended = tuple[int, float, int, int, BaseException | None]
"""Number, seconds, block, bytes, or the error."""


class LocalReads:
    """``ended`` is called in the event loop for every read. ``read``, in a thread: block and bytes of a source; else
    they come from its file. ``placing``: where they are to go; to the page cache where the file system is such that
    workers find them there."""

    def __init__(
        self,
        blocks: Blocks,
        ended: Callable[[Ended], None],
        read: Callable[[Source, Where], tuple[int, int]] | None = None,
        placing: Placing | None = None,
    ) -> None:
        self._blocks = blocks
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[_Task | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._held: list[deque[_Task]] = []  # what each has taken and not begun to wait for
        self._under_way = 0
        self._together = _TOGETHER // 2  # files that a thread takes at a time: nothing is known of them yet
        self._ends = 0  # of reads
        self._watch: asyncio.TimerHandle | None = None
        self._done: list[Ended] = []  # not taken
        self._told, self._told_at = False, 0.0  # whether the event loop has been woken for them; when it took the last
        self._lock = threading.Lock()
        self._files = _OpenFiles()
        self._read = read or self._read_file
        self._placing, self._page_cache, self._uncached = placing, PageCache(), Uncached()

    def submit(self, number: int, source: Source) -> None:
        """Read this next."""
        self._under_way += 1
        where = Where.BLOCK if self._placing is None else self._placing.where(number)
        each = self._together if where is Where.PAGE_CACHE else 1
        if self._under_way > len(self._threads) * each:
            self._add_thread()
        self._queue.put((number, source, where))
        if self._watch is None:
            self._watch = self._loop.call_later(_STUCK_S, self._look, self._ends)

    def close(self) -> None:
        """Let the threads end, without waiting for what storage does not answer."""
        if self._watch is not None:
            self._watch.cancel()
        for _ in self._threads:
            self._queue.put(None)

    def _add_thread(self) -> None:
        if len(self._threads) < _MOST_THREADS:
            name, held = f"minato-read-{len(self._threads)}", deque[_Task]()
            thread = threading.Thread(target=self._work, args=(held,), daemon=True, name=name)
            self._threads.append(thread)
            self._held.append(held)
            thread.start()

    def _look(self, ends: int) -> None:
        """Nothing may come because threads wait for files that do not: others then take over what is next of them."""
        self._take()
        if ends == self._ends:
            for held in self._held:
                for task in _popped(held):
                    self._queue.put(task)
            if not self._queue.empty():
                self._add_thread()
        again = self._under_way > 0
        self._watch = self._loop.call_later(_STUCK_S, self._look, self._ends) if again else None

    def _work(self, held: deque[_Task]) -> None:
        while (task := self._queue.get()) is not None:
            tasks = [task, *self._more(task)]
            held += tasks
            files = {each[0]: _begun(each) for each in tasks} if len(tasks) > 1 else {}
            try:
                for each in _popped(held):
                    self._do(each, files.pop(each[0], -1), last=not held)
            except RuntimeError:  # the loop has been closed
                return
            for file in files.values():
                if file >= 0:
                    os.close(file)

    def _more(self, first: _Task) -> list[_Task]:
        """What the thread takes together with that."""
        found: list[_Task] = []
        while first[2] is Where.PAGE_CACHE and len(found) < self._together - 1:
            try:
                task = self._queue.get_nowait()
            except Empty:
                break
            if task is None:  # for another thread
                self._queue.put(None)
                break
            found.append(task)
        return found

    def _do(self, task: _Task, file: int, *, last: bool) -> None:
        """``file``: the source's, open, if it is not below 0; ``last``: of those that are told together."""
        number, source, where = task
        begin = monotonic()
        try:
            block, nbytes = self._read(source, where) if file < 0 else self._read_begun(file, source, where)
            ended: Ended = number, monotonic() - begin, block, nbytes, None
        except BaseException as error:
            ended = number, monotonic() - begin, NOWHERE, 0, error
        with self._lock:
            self._done.append(ended)
            tell = (last or monotonic() > self._told_at + _TELL_S) and not self._told
            self._told = self._told or tell
        if tell:
            self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        with self._lock:
            done, self._done, self._told, self._told_at = self._done, [], False, monotonic()
        if not done:
            return
        self._ends += len(done)
        self._under_way -= len(done)
        self._together = min(_TOGETHER, *(_as_many(*each[2:4]) for each in done))
        for each in done:
            self._ended(each)

    def _read_file(self, source: Source, where: Where) -> tuple[int, int]:
        if source.length is None:
            return self._read_begun(os.open(source.file, os.O_RDONLY | os.O_CLOEXEC), source, where)
        file, sized = self._files.opened(source.file)
        return self._read_open(file.fd, source, where if sized else Where.BLOCK)

    def _read_begun(self, file: int, source: Source, where: Where) -> tuple[int, int]:
        try:
            return self._read_open(file, source, where)
        finally:
            os.close(file)

    def _read_open(self, file: int, source: Source, where: Where) -> tuple[int, int]:
        if where is Where.PAGE_CACHE:
            brought = self._page_cache.bring_in(file, source)
            if brought is not None:
                return IN_PAGE_CACHE, brought
        nbytes = source.length
        if nbytes is None:
            found = os.fstat(file)
            if not tells_size(found):
                return self._lay_down(read_to_end(file, source.offset))
            nbytes = found.st_size - source.offset
        if where is Where.UNCACHED and self._placing is not None and self._placing.is_open:
            self._placing.had(nbytes, cached_bytes(file, source.offset, nbytes))
        return self._fill(file, source, nbytes, where)

    def _lay_down(self, data: bytes) -> tuple[int, int]:
        block, view = self._blocks.allocate(len(data))
        view[:] = data
        return block, len(data)

    def _fill(self, file: int, source: Source, nbytes: int, where: Where) -> tuple[int, int]:
        if nbytes < 0:
            raise EOFError(f"{source} begins {-nbytes} bytes after the end")
        block, view = self._blocks.allocate(nbytes)
        try:
            read = self._uncached.read if where is Where.UNCACHED else read_into
            found = read(file, view, source.offset)
            if found < nbytes:
                raise EOFError(f"{source} ends {nbytes - found} bytes too early")
        except BaseException:
            self._blocks.free(block)
            raise
        return block, nbytes


def _as_many(block: int, nbytes: int) -> int:
    """How many files like the one that lies there a thread takes at a time."""
    return max(1, _TOGETHER_BYTES // max(nbytes, 1)) if block == IN_PAGE_CACHE else 1


def _begun(task: _Task) -> int:
    """The file, open, with which the kernel has begun; -1 where it is not to be, and what is wrong is found later."""
    _, source, where = task
    if source.length is not None or where is not Where.PAGE_CACHE:
        return -1
    try:
        file = os.open(source.file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return -1
    try:
        os.posix_fadvise(file, source.offset, _TOGETHER_BYTES, os.POSIX_FADV_WILLNEED)
    except OSError:  # no regular file
        os.close(file)
        return -1
    return file


def _popped(tasks: deque[_Task]) -> Iterator[_Task]:
    """From the left, until there are no more; another thread may do so at the same time."""
    while tasks:
        try:
            yield tasks.popleft()
        except IndexError:
            return


class _OpenFiles:
    """Files of which parts are read, such as shards: they stay open, the most recent ones, while they are the same."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[str, tuple[tuple[int, ...], OpenFile]] = OrderedDict()

    def opened(self, path: str) -> tuple[OpenFile, bool]:
        """The file, to be held while its ``fd`` is in use, and whether it tells its size."""
        found = Path(path).stat()
        version = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        with self._lock:
            before, file = self._files.get(path, (None, None))
            if file is not None and before == version:
                self._files.move_to_end(path)
                return file, tells_size(found)
        file = OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))  # which may take its time
        with self._lock:
            self._files[path] = version, file
            self._files.move_to_end(path)
            if len(self._files) > _OPEN:
                self._files.popitem(last=False)
        return file, tells_size(found)
