"""A worker's job, pickled once for all workers that a start method other than fork starts.

Every worker unpickles a copy of its own from shared memory, so that what ``__setstate__`` opens is its own. A million
paths take 0.2 s to pickle and 60 MB: PyTorch's loader does that for each worker, and waits until the last of them has
read it from a pipe.

A fork server imports the job's modules before it forks, instead of each worker. It does so where the loader is the
first to use the server of this program, and meanwhile the job is pickled. It stays with what it has imported otherwise.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import sys
from multiprocessing import context, forkserver, reduction
from multiprocessing.popen_forkserver import Popen as ForkServerPopen
from pickle import HIGHEST_PROTOCOL, loads
from types import ModuleType

from minato_gpu.lanes.produce import Job
from minato_gpu.samples import Value

_MAIN = ("__main__", "__mp_main__")


class SharedPickle:
    """``value`` for several processes, as an argument of ``multiprocessing.Process``: each gets a copy.

    No argument before this one may need descriptors: its own must have the same numbers in every process.
    """

    def __init__(self, value: Job) -> None:
        self.value = value
        self._memory = -1
        self._fds: list[int] = []  # descriptors that the value's own locks, queues and shared tensors need

    def __reduce__(self) -> tuple[object, ...]:
        """Called in the parent while it starts a process. Raises what the value's pickling raises."""
        starting = _Starting(context.get_spawning_popen())
        if self._memory < 0:
            self._pickle(starting)
        else:
            for fd in self._fds:
                starting.duplicate_for_child(fd)
        return _unpickled, (reduction.DupFd(self._memory),)

    def _pickle(self, starting: _Starting) -> None:
        _start_server(self.value)
        fd = os.memfd_create("minato-job", os.MFD_CLOEXEC)
        context.set_spawning_popen(starting)  # type: ignore[arg-type]
        try:
            with open(fd, "wb", closefd=False) as file:
                reduction.ForkingPickler(file, HIGHEST_PROTOCOL).dump(self.value)
        except BaseException:
            os.close(fd)
            raise
        finally:
            context.set_spawning_popen(starting.popen)
        self._memory, self._fds = fd, starting.fds

    def close(self) -> None:
        """Releases the memory. A process that is started later pickles the value anew, as it is then."""
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1


def _unpickled(memory: Value) -> Value:
    """Returns the value, in a worker."""
    with os.fdopen(memory.detach(), "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return loads(data)


class _Starting:
    """The object that multiprocessing starts a process with; it notes the descriptors that go along."""

    def __init__(self, popen: Value) -> None:
        self.popen = popen
        self.fds: list[int] = []
        self.DupFd = popen.DupFd

    def duplicate_for_child(self, fd: int) -> int:
        """Has a descriptor go along; returns by which number the process will know it."""
        self.fds.append(fd)
        return int(self.popen.duplicate_for_child(fd))


def _start_server(job: Job) -> None:
    """Starts the fork server, if that is the start method, with what the job's workers will import.

    A server that runs stays as it is. What the program wants it to import comes first.
    """
    if not isinstance(context.get_spawning_popen(), ForkServerPopen):
        return
    wanted = list(getattr(forkserver._forkserver, "_preload_modules", ["__main__"]))
    known = sorted(name for name in _modules(job) - {*wanted, *_MAIN} if name in sys.modules)
    multiprocessing.set_forkserver_preload([*wanted, "minato_gpu.lanes.processes", *known])
    forkserver.ensure_running()


def _modules(job: Job) -> set[str]:
    """Returns the modules of the job's parts, and those that the program's own file has imported.

    Every worker imports that file, too, if it is not a notebook.
    """
    values = [*vars(job).values(), *vars(sys.modules["__main__"]).values()]
    named: list[Value] = [value.__name__ for value in values if isinstance(value, ModuleType)]
    named += [getattr(each, "__module__", None) for value in values for each in (value, type(value))]
    return {name for name in named if isinstance(name, str)}
