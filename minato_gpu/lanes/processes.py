"""Worker processes: started, watched, and ended with the parent whatever happens to it.

With fork, a spawner is forked first, before the loader has any thread, and all workers come from it, also those
that replace a dead one later. It ends its children when its pipe to the parent closes, and the kernel kills them
(PR_SET_PDEATHSIG) should the spawner itself be killed; so even kill -9 of the parent leaves nothing behind. With
spawn and forkserver the workers are started from the parent, and a thread in each ends it when the parent is gone.

Decision: PR_SET_PDEATHSIG is not used in children of the parent itself: it follows the *thread* that forked, and a
loader may be started from a thread that ends early.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any

import torch
from torch._C import _set_worker_signal_handlers
from torch.utils.data._utils import worker as torch_worker

from minato_gpu.lanes.links import Links, close_inherited_ends
from minato_gpu.lanes.produce import Job
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.wire import SocketChannel
from minato_gpu.lanes.worker import Worker

_PR_SET_PDEATHSIG = 1


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


def worker_main(number: int, job: Job, links: Links, parent: int, alive: Any) -> None:
    """Entry of a worker process. ``alive``: a connection that closes with the parent (start methods but fork)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _set_worker_signal_handlers()
    if alive is None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        close_inherited_ends()
    else:
        threading.Thread(target=_end_with, args=(alive,), daemon=True).start()
    with contextlib.suppress(OSError):
        # a worker that is woken must not push the training process off its core, as it else would at every task
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    torch.set_num_threads(1)
    info = torch_worker.WorkerInfo(
        id=number, num_workers=job.num_workers, seed=job.base_seed + number, dataset=job.dataset
    )
    torch_worker._worker_info = info
    store = Store(number, links, links.arenas[number], links.board)
    Worker(number, job, SocketChannel(links, number), store, links.board, links.pokes[number]).run()


def _end_with(alive: Any) -> None:
    with contextlib.suppress(EOFError, OSError):
        alive.recv_bytes()
    os._exit(1)


class Started:
    """Worker processes started by the parent itself (spawn, forkserver)."""

    def __init__(self, context: Any, links: Links, job: Job, count: int) -> None:
        self.pids: dict[int, int] = {}
        self._gone: set[int] = set()
        self._alive, child = context.Pipe(duplex=True)
        self._processes: list[BaseProcess] = []
        try:
            for number in range(count):
                process = context.Process(target=worker_main, args=(number, job, links, os.getpid(), child))
                process.daemon = True
                _start(process)
                self._processes.append(process)
                assert process.pid is not None
                self.pids[number] = process.pid
        except BaseException:
            self.close(0.0)
            raise
        finally:
            child.close()

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
        """Wait for the workers to leave; end those that do not. Their channel must be closed already."""
        _end(self._processes, timeout)
        self._alive.close()


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


class Forked:
    """Worker processes forked by a spawner."""

    def __init__(self, context: Any, links: Links, job: Job, count: int) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._spawner = context.Process(target=_spawner_main, args=(theirs, self._control, context, links, job, count))
        self._spawner.start()
        theirs.close()
        self.pids: dict[int, int] = {}  # of the workers that the spawner has reported so far
        self._exits: list[Exit] = []
        self._control.setblocking(False)

    def fds(self) -> list[int]:
        """Readable when a worker (or the spawner) has ended."""
        return [self._control.fileno()]

    def exits(self) -> list[Exit]:
        """Workers that ended since the last call."""
        while self._read():
            pass
        out, self._exits = self._exits, []
        return out

    def _read(self) -> bool:
        try:
            data = self._control.recv(64)
        except BlockingIOError:
            return False
        if not data:
            if not self._exits:  # the spawner itself, and with it every worker
                self._spawner.join()
                self._exits.append(Exit(-1, self._spawner.pid or 0, self._spawner.exitcode))
            return False
        kind, number, pid, code = data.decode().split()
        if kind == "started":
            self.pids[int(number)] = int(pid)
        else:
            self._exits.append(Exit(int(number), int(pid), int(code)))
        return True

    def close(self, timeout: float) -> None:
        """Tell the spawner to end its workers and itself; their channel must be closed already."""
        with contextlib.suppress(OSError):
            self._control.setblocking(True)
            self._control.send(f"{timeout}".encode())
        self._control.shutdown(socket.SHUT_WR)
        self._spawner.join(timeout + 10)
        if self._spawner.exitcode is None:
            self._spawner.kill()
            self._spawner.join()
        self._control.close()
        self._spawner.close()


def _spawner_main(
    control: socket.socket, parents: socket.socket, context: Any, links: Links, job: Job, count: int
) -> None:
    """Fork the workers, report their ends, and end them when told to or when the parent is gone."""
    gc.freeze()  # or the first full collection in each worker would copy every page of what it inherited
    parents.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    workers: dict[int, tuple[int, BaseProcess]] = {}
    for number in range(count):
        process = context.Process(target=_forked_worker, args=(control, number, job, links, os.getpid()))
        process.daemon = True
        process.start()
        workers[process.sentinel] = (number, process)
        control.send(f"started {number} {process.pid} 0".encode())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a signal to the whole group: leave with the parent, not before
    close_inherited_ends()
    processes = [process for _, process in workers.values()]
    timeout = 0.0
    while True:
        ready = connection.wait([control, *workers])
        for sentinel in ready:
            if isinstance(sentinel, int):
                number, process = workers.pop(sentinel)
                process.join()
                with contextlib.suppress(OSError):
                    control.send(f"ended {number} {process.pid} {process.exitcode}".encode())
        if control in ready:
            with contextlib.suppress(OSError):
                timeout = float(control.recv(64) or 0.0)
            break
    _end(processes, timeout)
    control.close()
    sys.stdout.flush()
    os._exit(0)


def _forked_worker(control: socket.socket, number: int, job: Job, links: Links, parent: int) -> None:
    control.close()
    worker_main(number, job, links, parent, None)


def _end(processes: list[BaseProcess], timeout: float) -> None:
    """Give the processes ``timeout`` seconds to leave by themselves, then terminate, then kill them."""
    act: tuple[Callable[[BaseProcess], None] | None, ...] = (None, BaseProcess.terminate, BaseProcess.kill)
    for step, grace in zip(act, (timeout, 1.0, None), strict=True):
        for process in processes:
            if step is not None and process.exitcode is None:
                step(process)
        _join_all(processes, grace)
    for process in processes:
        process.join()


def _join_all(processes: list[BaseProcess], timeout: float | None) -> None:
    """Wait until all processes have ended, at most ``timeout`` seconds together."""
    end = None if timeout is None else monotonic() + timeout
    for process in processes:
        process.join(None if end is None else max(0.0, end - monotonic()))
