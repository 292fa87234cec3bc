"""Worker processes: started, watched, replaced, and ended with the parent whatever happens to it.

A worker ends when its channel closes, and at the latest with the parent, even if that is killed: the kernel sends it
SIGKILL (PR_SET_PDEATHSIG) where the parent's main thread forked it. Otherwise a thread in the worker waits for a
connection to close, because PR_SET_PDEATHSIG follows the *thread* that forked, which may end early.

A replacement must not be forked from the parent, which runs threads by then. With fork it comes from a process that
is there for this alone (spawner.py), forked at the start where workers are replaced at all. With another start method
the context given starts it, in a thread: that takes as long as importing the program.

Rejected: to let those fork all workers. One fork after another costs an eighth of the time to the first batch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import select
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess, SpawnProcess
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import NamedTuple

import torch
from torch._C import _set_worker_signal_handlers
from torch.utils.data._utils import worker as torch_worker

from minato_gpu.lanes import forking, stacks
from minato_gpu.lanes.contract import Exit
from minato_gpu.lanes.priority import give_way
from minato_gpu.lanes.produce import Job
from minato_gpu.lanes.spawner import LOST, Context, Gate, Process, Spawner, readable
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.wire import SocketChannel
from minato_gpu.lanes.worker import Worker
from minato_gpu.lanes.worker_channels import WorkerChannels, close_inherited_ends
from minato_gpu.samples import Value
from minato_gpu.threads import OwnThread

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_LIBC = ctypes.CDLL(None)


Blocks = Sequence[tuple[int, int]]
"""Offset and bytes of what lies in a worker's arena."""


class WorkerDied(RuntimeError):
    """A worker process ended while it was needed."""


class KilledWorkers(WorkerDied):
    """A sample, or a batch that was to be joined, ended one worker after the other: it is bad, and others go on."""


def worker_main(
    number: int, job: Job, links: WorkerChannels, tie: Tie, blocks: Blocks = (), gate: Gate | None = None
) -> None:
    """Entry of a worker process. ``blocks``: of its arena, those that its predecessor laid down and that are in use."""
    forking.begin()
    _set_worker_signal_handlers()
    close_inherited_ends()
    tie.hold()
    if gate is not None:
        gate.pass_()
    stacks.offer(links.stack_writers[number])
    try:
        _work(number, job, links, blocks)
    except BaseException as error:  # no error of a sample: SystemExit, a class of the user's own
        stacks.leave_word(links.stack_writers[number], error)
        raise


def _work(number: int, job: Job, links: WorkerChannels, blocks: Blocks) -> None:
    give_way()
    torch.set_num_threads(1)
    keep_freed_memory()
    collate_in_own_memory()
    info = torch_worker.WorkerInfo(
        id=number, num_workers=job.num_workers, seed=job.base_seed + number, dataset=job.dataset
    )
    torch_worker._worker_info = info
    links.arenas[number].occupy(blocks)
    store = Store(number, links, links.arenas[number], links.board)
    if store.handover is not None:
        store.handover.serve()
    Worker(number, job, SocketChannel(links, number), store, links).run()


def keep_freed_memory() -> None:
    """Let malloc reuse the memory of large arrays instead of returning it to the kernel after each sample.

    Every sample makes and drops arrays of megabytes. By default glibc maps each anew, and the kernel clears it page by
    page: about a seventh of the time of large photographs and volumes. 32 MiB is the most that glibc takes for
    M_MMAP_THRESHOLD.
    """
    if hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        _LIBC.mallopt(_M_TRIM_THRESHOLD, 256 << 20)


def collate_in_own_memory() -> None:
    """Let PyTorch's ``default_collate`` make its batch in ordinary memory, as it does outside of a worker.

    In a worker it opens a file of /dev/shm for each tensor and unlinks it: a worker that is killed in between leaves it
    behind for good. What it would share is copied to the worker's arena in any case.
    """

    def own(cls: type[torch.UntypedStorage], size: int, *, device: torch.device | str = "cpu") -> torch.UntypedStorage:
        return cls(size, device=device)

    torch.UntypedStorage._new_shared = classmethod(own)  # type: ignore[assignment]


class Tie:
    """What ends a worker with its parent. Made there, ``hold`` is called in the worker."""

    def __init__(self, context: Context, links: WorkerChannels, *, forks: bool) -> None:
        self._parent = os.getpid()
        self._by_kernel = forks and threading.current_thread() is threading.main_thread()
        self._ours: Connection | None = None
        self._theirs: Connection | None = None
        if not self._by_kernel:
            self._ours, self._theirs = context.Pipe(duplex=True)
            links.parent_ends.append(self._ours)

    def __getstate__(self) -> dict[str, Value]:
        return {**self.__dict__, "_ours": None}

    def started(self) -> None:
        """In the parent: every worker has its end."""
        if self._theirs is not None:
            self._theirs.close()

    def loosen(self, links: WorkerChannels) -> None:
        """In the parent: the only worker that held it has ended."""
        if self._ours is not None:
            with contextlib.suppress(ValueError):
                links.parent_ends.remove(self._ours)
            self._ours.close()

    def hold(self) -> None:
        """In the worker: from now on it ends with the parent."""
        if self._by_kernel:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._parent:
                os._exit(1)
        else:
            threading.Thread(target=_end_with, args=(self._theirs,), daemon=True).start()


def _end_with(connection: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        connection.recv_bytes()
    os._exit(1)


class _Start(NamedTuple):
    """A replacement, or why it could not be started. ``thread`` and ``tie``: of a start method other than fork."""

    number: int
    process: Process | Exception
    thread: threading.Thread | None = None
    tie: Tie | None = None


class Workers:
    """The worker processes of one lane. ``replaceable``: one that has ended can be replaced."""

    def __init__(
        self, context: Context, links: WorkerChannels, job: Job, count: int, *, forks: bool, replaceable: bool = False
    ) -> None:
        self.pids: list[int] = []
        self._context, self._links, self._job = context, links, job
        self._running: dict[int, Process] = {}  # by number
        self._ties: dict[int, Tie] = {}  # by number, of those that hold one alone
        self._watch = select.epoll()
        self._watched: dict[int, int] = {}  # by number: what becomes readable when it ends
        self._spawner: Spawner | None = None
        self._starting: set[threading.Thread] = set()
        self._started: deque[_Start] = deque()  # appended to by threads
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._watch.register(self._bell, select.EPOLLIN)
        tie = Tie(context, links, forks=forks)
        try:
            for number in range(count):
                self._adopt(number, self._start(number, tie))
            if replaceable and forks:
                self._spawner = Spawner(context, links, self._replacement)
                self._watch.register(self._spawner.fileno(), select.EPOLLIN)
        except BaseException:
            links.close_parent_ends()
            self.close(0.0)
            raise
        finally:
            tie.started()

    def _start(self, number: int, tie: Tie, blocks: Blocks = (), gate: Gate | None = None) -> BaseProcess:
        arguments = number, self._job, self._links, tie, blocks, gate
        process: BaseProcess = self._context.Process(target=worker_main, args=arguments)
        process.daemon = True
        _start(process)
        return process

    def _replacement(self, number: int, blocks: Blocks, gate: Gate) -> BaseProcess:
        """In the spawner: a new worker, which ends with the spawner as that does with the parent."""
        return self._start(number, Tie(self._context, self._links, forks=True), blocks, gate)

    def _adopt(self, number: int, process: Process) -> None:
        assert process.pid is not None
        self.pids[number : number + 1] = [process.pid]
        self._watched[number] = end = _end_of(process)
        self._running[number] = process
        self._watch.register(end, select.EPOLLIN)

    def _let_go(self, number: int) -> None:
        """A process has ended, and its exit code is known."""
        process, end = self._running.pop(number), self._watched.pop(number)
        self._watch.unregister(end)
        if end != process.sentinel:
            os.close(end)
        process.close()

    def fds(self) -> list[int]:
        """Readable when a worker has ended, or a replacement has started."""
        return [self._watch.fileno()]

    def exits(self) -> list[Exit]:
        """Workers that ended since the last call."""
        self._take_news()
        found = []
        for number, process in list(self._running.items()):
            if process.exitcode is not None:
                found.append(Exit(number, self.pids[number], process.exitcode))
                self._let_go(number)
                if number in self._ties:
                    self._ties.pop(number).loosen(self._links)
        return found

    def replace(self, number: int, blocks: Blocks) -> None:
        """Start another worker in the place of one that has ended; ``arrivals`` tells when it has been."""
        if self._spawner is not None:
            if self._spawner.gone:
                self._started.append(_Start(number, RuntimeError(LOST)))
                os.eventfd_write(self._bell, 1)
            else:
                self._spawner.request(number, blocks)
            return
        thread = OwnThread(target=self._start_apart, args=(number, blocks), name="minato-starter", daemon=True)
        self._starting.add(thread)
        thread.start()

    def _start_apart(self, number: int, blocks: Blocks) -> None:
        tie = Tie(self._context, self._links, forks=False)
        process: Process | Exception
        try:
            process = self._start(number, tie, blocks)
        except Exception as error:
            process = error
        tie.started()
        self._started.append(_Start(number, process, threading.current_thread(), tie))
        os.eventfd_write(self._bell, 1)

    def arrivals(self) -> tuple[list[int], list[Exit]]:
        """The numbers of replacements that have started since the last call, and those that could not be."""
        self._take_news()
        arrived, failed = list[int](), list[Exit]()
        while self._started:
            number, process, thread, tie = self._started.popleft()
            if thread is not None:
                thread.join()
                self._starting.discard(thread)
            if isinstance(process, Exception):
                failed.append(Exit(number, -1, None, unborn=str(process)))
                if tie is not None:
                    tie.loosen(self._links)
                continue
            self._adopt(number, process)
            arrived.append(number)
            if tie is not None:
                self._ties[number] = tie
        return arrived, failed

    def _take_news(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        if self._spawner is not None:
            self._started.extend(_Start(*news) for news in self._spawner.news())

    def kill(self, number: int) -> None:
        """End this worker at once."""
        if number in self._running:
            self._running[number].kill()

    def close(self, timeout: float) -> None:
        """Give the workers ``timeout`` seconds to leave by themselves, then terminate, then kill them.

        Their channel must be closed already.
        """
        for thread in self._starting:
            thread.join()
        self.arrivals()
        running = list(self._running.items())
        act: tuple[Callable[[Process], None] | None, ...] = (None, lambda p: p.terminate(), lambda p: p.kill())
        for step, grace in zip(act, (timeout, 1.0, None), strict=True):
            end = None if grace is None else monotonic() + grace
            for _, process in running:
                if step is not None and process.exitcode is None:
                    step(process)
            for number, process in running:
                if process.exitcode is None:
                    readable(self._watched[number], None if end is None else max(0.0, end - monotonic()))
        if self._spawner is not None:
            for process in self._spawner.close():  # those that were on their way
                process.close()
        for number, _ in running:
            self._let_go(number)
        self._watch.close()
        os.close(self._bell)


def _end_of(process: Process) -> int:
    """What becomes readable when the process ends.

    The sentinel of one forked here is a pipe, which whatever the process has forked itself keeps open: not that one.
    """
    if isinstance(process, (ForkProcess, SpawnProcess)) and process.pid:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and been collected, already
            return os.pidfd_open(process.pid)
    return int(process.sentinel)


def _start(process: BaseProcess) -> None:
    try:
        forking.start(process)
    except (TypeError, AttributeError, pickle.PicklingError):
        warnings.warn(
            "Got pickle error when attempting to start a worker Process. With this start method the data set, the "
            "collate function and worker_init_fn must be picklable: define them at a module's top level, or pass "
            "multiprocessing_context='fork'.",
            stacklevel=2,
        )
        raise
