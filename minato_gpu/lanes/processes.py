"""Worker processes: started, watched, and ended with the parent whatever happens to it.

A worker ends when its channel closes, and at the latest with the parent, even if that is killed: the kernel sends it
SIGKILL (PR_SET_PDEATHSIG) where the parent's main thread forked it. Otherwise a thread in the worker waits for a
connection to close, because PR_SET_PDEATHSIG follows the *thread* that forked, which may end early.

Rejected: a spawner, forked first, that forks all workers. It costs a process and, one fork after another, an eighth of
the time to the first batch.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import signal
import threading
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any

import torch
from torch._C import _set_worker_signal_handlers
from torch.utils.data._utils import worker as torch_worker

from minato_gpu.lanes import stacks
from minato_gpu.lanes.links import Links, close_inherited_ends
from minato_gpu.lanes.priority import give_way
from minato_gpu.lanes.produce import Job
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.wire import SocketChannel
from minato_gpu.lanes.worker import Worker

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_LIBC = ctypes.CDLL(None)


class Exit:
    """A worker process that ended: its number, process id and exit code (negative: the signal)."""

    def __init__(self, number: int, pid: int, code: int | None) -> None:
        self.number = number
        self.pid = pid
        self.code = code

    def message(self) -> str:
        """What PyTorch says of a dead worker, with what is known besides."""
        if self.code is not None and self.code < 0:
            name = signal.strsignal(-self.code) or f"signal {-self.code}"
            return (
                f"DataLoader worker (pid {self.pid}) is killed by signal: {name}. "
                "It is possible that the worker ran out of memory; see the kernel's log."
                if self.code == -signal.SIGKILL
                else f"DataLoader worker (pid {self.pid}) is killed by signal: {name}. "
            )
        return f"DataLoader worker (pid(s) {self.pid}) exited unexpectedly with exit code {self.code}. "


def worker_main(number: int, job: Job, links: Links, tie: Tie) -> None:
    """Entry of a worker process."""
    gc.freeze()  # else the first full collection would copy every page that was inherited
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _set_worker_signal_handlers()
    close_inherited_ends()
    tie.hold()
    stacks.offer(links.stack_writers[number])
    give_way()
    torch.set_num_threads(1)
    keep_freed_memory()
    info = torch_worker.WorkerInfo(
        id=number, num_workers=job.num_workers, seed=job.base_seed + number, dataset=job.dataset
    )
    torch_worker._worker_info = info
    store = Store(number, links, links.arenas[number], links.board)
    if store.handover is not None:
        store.handover.serve()
    Worker(number, job, SocketChannel(links, number), store, links.board, links.pokes[number]).run()


def keep_freed_memory() -> None:
    """Let malloc reuse the memory of large arrays instead of returning it to the kernel after each sample.

    Every sample makes and drops arrays of megabytes. By default glibc maps each anew, and the kernel clears it page by
    page: about a seventh of the time of large photographs and volumes. 32 MiB is the most that glibc takes for
    M_MMAP_THRESHOLD.
    """
    if hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        _LIBC.mallopt(_M_TRIM_THRESHOLD, 256 << 20)


class Tie:
    """What ends a worker with its parent. Made there, ``hold`` is called in the worker."""

    def __init__(self, context: Any, links: Links, *, forks: bool) -> None:
        self._parent = os.getpid()
        self._by_kernel = forks and threading.current_thread() is threading.main_thread()
        self._theirs: Any = None
        if not self._by_kernel:
            mine, self._theirs = context.Pipe(duplex=True)
            links.parent_ends.append(mine)

    def started(self) -> None:
        """In the parent: every worker has its end."""
        if self._theirs is not None:
            self._theirs.close()

    def hold(self) -> None:
        """In the worker: from now on it ends with the parent."""
        if self._by_kernel:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._parent:
                os._exit(1)
        else:
            threading.Thread(target=_end_with, args=(self._theirs,), daemon=True).start()


def _end_with(connection: Any) -> None:
    with contextlib.suppress(EOFError, OSError):
        connection.recv_bytes()
    os._exit(1)


class Workers:
    """The worker processes of one lane."""

    def __init__(self, context: Any, links: Links, job: Job, count: int, *, forks: bool) -> None:
        self.pids: list[int] = []
        self._gone: set[int] = set()
        self._processes: list[BaseProcess] = []
        tie = Tie(context, links, forks=forks)
        try:
            for number in range(count):
                process = context.Process(target=worker_main, args=(number, job, links, tie))
                process.daemon = True
                _start(process)
                self._processes.append(process)
                assert process.pid is not None
                self.pids.append(process.pid)
        except BaseException:
            links.close_parent_ends()
            self.close(0.0)
            raise
        finally:
            tie.started()

    def fds(self) -> list[int]:
        """Readable when a worker has ended."""
        return [p.sentinel for n, p in enumerate(self._processes) if n not in self._gone]

    def exits(self) -> list[Exit]:
        """Workers that ended since the last call."""
        out = []
        for number, process in enumerate(self._processes):
            if number not in self._gone and process.exitcode is not None:
                self._gone.add(number)
                out.append(Exit(number, self.pids[number], process.exitcode))
        return out

    def close(self, timeout: float) -> None:
        """Give the workers ``timeout`` seconds to leave by themselves, then terminate, then kill them.

        Their channel must be closed already.
        """
        act: tuple[Callable[[BaseProcess], None] | None, ...] = (None, BaseProcess.terminate, BaseProcess.kill)
        for step, grace in zip(act, (timeout, 1.0, None), strict=True):
            end = None if grace is None else monotonic() + grace
            for process in self._processes:
                if step is not None and process.exitcode is None:
                    step(process)
            for process in self._processes:
                process.join(None if end is None else max(0.0, end - monotonic()))


def _start(process: BaseProcess) -> None:
    try:
        process.start()
    except (TypeError, AttributeError, pickle.PicklingError):
        warnings.warn(
            "Got pickle error when attempting to start a worker Process. With this start method the data set, the "
            "collate function and worker_init_fn must be picklable: define them at a module's top level, or pass "
            "multiprocessing_context='fork'.",
            stacklevel=2,
        )
        raise
