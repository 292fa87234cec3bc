"""Worker processes: started, watched, replaced, and ended with the parent whatever happens to it.

A worker ends when its channel closes, and at the latest with the parent, even if that is killed: the kernel sends it
SIGKILL (PR_SET_PDEATHSIG) where the parent's main thread forked it. Otherwise a thread in the worker waits for its
socket to close, because PR_SET_PDEATHSIG follows the *thread* that forked, which may end early.

A replacement must not be forked from the parent, which runs threads by then. With fork it comes from a process that
is there for this alone (spawner.py), forked at the start where workers are replaced at all. With another start method
the context given starts it.

Rejected: to let that process fork all workers. One fork after another costs an eighth of the time to the first batch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import select
import signal
import socket
import threading
import warnings
from contextlib import closing
from functools import partial
from multiprocessing.context import ForkProcess, SpawnProcess
from multiprocessing.process import BaseProcess
from time import monotonic

import torch
from torch._C import _set_worker_signal_handlers
from torch.utils.data._utils import worker as torch_worker

from minato_gpu.lanes import forking, stacks
from minato_gpu.lanes.contract import Exit, Opened
from minato_gpu.lanes.produce import Job
from minato_gpu.lanes.shared_pickle import SharedPickle
from minato_gpu.lanes.spawner import Adopted, Blocks, Context, Spawner, readable
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.worker import Worker
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory.status_board import KNOWN
from minato_gpu.util import children

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_LIBC = ctypes.CDLL(None)


class WorkerDied(RuntimeError):
    """A worker process or thread ended while it was needed, or could not be replaced."""


class KilledWorkers(WorkerDied):
    """A sample, or a batch that was to be joined, ended one worker after the other: it is bad, and others go on."""


def worker_main(
    job: Job | SharedPickle, number: int, links: WorkerChannels, parent: int, blocks: Blocks | None = None
) -> None:
    """Is the entry of a worker process.

    ``parent``: see ``_end_with``. ``blocks``: those that its predecessor stored and that are in use, if it replaces
    one.
    """
    _set_worker_signal_handlers()
    forking.begin()
    _be_called(f"minato-worker {number}")
    if isinstance(job, SharedPickle):  # a context that forks, and does not say so
        job = job.value
    end = links.stack_writer
    _end_with(parent, end)
    if blocks is not None:
        links.arenas[number].occupy(blocks)
        links.board.await_parent(number)
    stacks.offer(end)
    try:
        _work(number, job, links)
    except BaseException as error:  # no error of a sample: SystemExit, a class of the user's own
        stacks.leave_word(end, error)
        raise


def _be_called(name: str) -> None:
    """Names this process and its main thread, for top and py-spy. The kernel keeps 15 characters."""
    threading.current_thread().name = name
    _LIBC.prctl(_PR_SET_NAME, name.replace("worker", "work" if len(name) > 15 else "worker").encode())


def _work(number: int, job: Job, links: WorkerChannels) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    collate_in_own_memory()
    info = torch_worker.WorkerInfo(
        id=number, num_workers=job.num_workers, seed=job.base_seed + number, dataset=job.dataset
    )
    torch_worker._worker_info = info
    store = Store(number, links, links.arenas[number])
    if store.handover is not None:
        store.handover.serve()
    Worker(number, job, partial(links.receive, number), store, links).run()


def keep_freed_memory() -> None:
    """Lets malloc reuse the memory of large arrays instead of returning it to the kernel after each sample.

    Every sample makes and drops arrays of megabytes. By default glibc maps each anew, and the kernel clears it page by
    page: about a seventh of the time of large photographs and volumes. 32 MiB is the most that glibc takes for
    M_MMAP_THRESHOLD.
    """
    if hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        _LIBC.mallopt(_M_TRIM_THRESHOLD, 256 << 20)


def collate_in_own_memory() -> None:
    """Lets PyTorch's ``default_collate`` make its batch in ordinary memory, as it does outside of a worker.

    In a worker it opens a file of /dev/shm for each tensor and unlinks it: a worker that is killed in between leaves it
    behind for good. What it would share is copied to the worker's arena in any case.
    """

    def own(cls: type[torch.UntypedStorage], size: int, *, device: torch.device | str = "cpu") -> torch.UntypedStorage:
        return cls(size, device=device)

    torch.UntypedStorage._new_shared = classmethod(own)  # type: ignore[assignment]


def _ends_by_kernel(*, forks: bool) -> int:
    """Returns this process's id if the kernel can end the workers that this thread starts along with it, else 0."""
    return os.getpid() if forks and threading.current_thread() is threading.main_thread() else 0


def _end_with(parent: int, end: socket.socket) -> None:
    """Has this worker end with the process ``parent``, whose main thread has forked it; 0: with the other end of
    this socket."""
    if not parent:
        threading.Thread(target=_end_when_closed, args=(end.fileno(),), daemon=True).start()
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _end_when_closed(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, 0)  # reports nothing else
    poll.poll()
    os._exit(1)


class _Started:
    """A worker that this process has started, as ``Adopted`` is one that the spawner has forked."""

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None
        self._process, self.pid, self.sentinel = process, process.pid, _end_of(process)

    @property
    def exitcode(self) -> int | None:
        """The exit code; None while it runs."""
        return children.exit_code(self._process, self.sentinel)

    def kill(self) -> None:
        """Kills it."""
        children.kill(self._process)

    def join(self) -> None:
        """Waits for its end."""
        if self.sentinel == self._process.sentinel:  # a pipe, perhaps, which what the worker has started may keep open
            self._process.join()
        else:
            readable(self.sentinel, None)

    def close(self) -> None:
        """Releases it, once it has ended."""
        if self.sentinel != self._process.sentinel:
            os.close(self.sentinel)
        children.close(self._process)


class Workers:
    """The worker processes of one lane. ``replaceable``: one that has ended can be replaced."""

    def __init__(
        self, context: Context, links: WorkerChannels, job: Job, count: int, *, forks: bool, replaceable: bool
    ) -> None:
        self.pids: list[int] = []
        self._context, self._links, self._job, self._forks = context, links, job, forks
        self._running: dict[int, _Started | Adopted] = {}  # by worker number
        self._watch = select.epoll()
        self._hung: dict[int, str] = {}  # what a worker was at that is being killed, by worker number
        self._spawner: Spawner | None = None
        # replacements that ``news`` will tell of, by worker number
        self._replaced: list[tuple[int, _Started | Adopted | Exception]] = []
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._watch.register(self._bell, select.EPOLLIN)
        try:
            with closing(SharedPickle(job)) as pickled:
                for number in range(count):
                    self._adopt(number, _Started(self._start(number, pickled=pickled)))
            if replaceable and forks:
                self._spawner = Spawner(context, links, self._start)
                self._watch.register(self._spawner.fileno(), select.EPOLLIN)
        except BaseException:
            links.close_parent_ends()
            self.close(0.0)
            raise

    def _start(self, number: int, blocks: Blocks | None = None, *, pickled: SharedPickle | None = None) -> BaseProcess:
        """Starts worker ``number``. ``pickled``: the job, for a process that is not forked."""
        job, parent = self._job if self._forks else pickled, _ends_by_kernel(forks=self._forks)
        process: BaseProcess = self._context.Process(
            target=worker_main, args=(job, number, self._links, parent, blocks)
        )
        process.daemon = True
        _start(process)
        return process

    def _adopt(self, number: int, process: _Started | Adopted) -> None:
        self.pids[number : number + 1] = [process.pid]
        self._running[number] = process
        self._watch.register(process.sentinel, select.EPOLLIN)
        self._links.board.words[self._links.board.row(number) + KNOWN] = process.pid

    def _let_go(self, number: int) -> None:
        """Releases a process that has ended."""
        process = self._running.pop(number)
        self._watch.unregister(process.sentinel)
        process.close()

    def fd(self) -> int:
        """Returns a descriptor that is readable when a worker has ended, or a replacement has started."""
        return self._watch.fileno()

    def news(self) -> list[Exit | Opened]:
        """Returns workers that ended since the last call, and replacements that have started or could not be."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        if self._spawner is not None:
            self._replaced += self._spawner.news()
        found: list[Exit | Opened] = []
        for number, process in list(self._running.items()):
            code = process.exitcode
            if code is not None:
                error, raised = self._links.stacks.last_words(process.pid)
                hung = self._hung.pop(number, "")
                found.append(Exit(number, process.pid, code, error=error, raised=raised, hung=hung))
                self._let_go(number)
        for number, started in self._replaced:
            if isinstance(started, Exception):
                found.append(Exit(number, -1, None, start_error=str(started)))
            else:
                self._adopt(number, started)
                found.append(Opened(1))
        self._replaced = []
        return found

    def replace(self, number: int, blocks: Blocks) -> None:
        """Starts another worker in place of one that has ended; ``news`` tells when it has started, or why it could
        not."""
        if self._spawner is not None:
            self._spawner.request(number, blocks)
        else:
            try:
                with closing(SharedPickle(self._job)) as pickled:
                    self._replaced.append((number, _Started(self._start(number, blocks, pickled=pickled))))
            except Exception as error:
                self._replaced.append((number, error))
        os.eventfd_write(self._bell, 1)  # a spawner that is gone would have nobody ask for news

    def kill(self, number: int, hung: str) -> None:
        """Kills this worker at once; ``hung`` says what it was at, and comes with its ``Exit``."""
        if number in self._running:
            self._hung[number] = hung
            if self._running[number].exitcode is None:  # its process id may be another's already
                self._running[number].kill()

    def close(self, timeout: float) -> None:
        """Gives the workers ``timeout`` seconds to leave by themselves, then kills them.

        Their channel must be closed already.
        """
        for number, started in self._replaced:
            if not isinstance(started, Exception):
                self._adopt(number, started)
        end = monotonic() + timeout
        for process in self._running.values():
            if process.exitcode is None and not readable(process.sentinel, max(0.0, end - monotonic())):
                process.kill()
        for process in self._running.values():
            process.join()
        if self._spawner is not None:
            for late in self._spawner.close():  # those that were on their way
                late.close()
        for number in list(self._running):
            self._let_go(number)
        self._watch.close()
        os.close(self._bell)


def _end_of(process: BaseProcess) -> int:
    """Returns a descriptor that is readable when the process ends.

    The sentinel of one forked or spawned here is a pipe, which whatever the process has forked itself keeps open: a
    process descriptor takes its place. That of a fork server's brings its exit code, and closes with the server: such
    a process takes another descriptor. Where the system has none, sentinels must do.
    """
    end: int | None = None
    with contextlib.suppress(ProcessLookupError):  # it has ended, and been collected, already
        end = children.descriptor(process.pid or 0)
    if end is None or not isinstance(process, (ForkProcess, SpawnProcess)):
        return int(process.sentinel) if end is None else end
    os.dup2(end, process.sentinel, inheritable=False)
    os.close(end)
    return process.sentinel


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
