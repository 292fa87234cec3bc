"""The shared memory, socket for tasks and bells that connect the engine and its CPU workers.

Tasks go through one socket that all workers read: the kernel hands each message to exactly one of them, whole, so
a free worker takes the next lease without asking, and a killed one takes at most its own lease along. A data set
that each worker iterates for itself needs addressed tasks, so there every worker has a socket of its own. What comes
back is marked as finished in shared memory (memory/completions.py). Everything ends when the parent's ends are closed.

Decision: SOCK_SEQPACKET instead of ``multiprocessing.Queue``: no feeder thread, no lock that a killed worker can
take with it, and message boundaries are kept by the kernel.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from multiprocessing import reduction
from typing import TypeVar
from weakref import WeakSet

from minato_gpu.memory import address_space
from minato_gpu.memory.arena import MOST, Arena
from minato_gpu.memory.completions import Bell, Completions
from minato_gpu.memory.loans import Loans
from minato_gpu.memory.status_board import ACTIVE, WorkerStatusBoard
from minato_gpu.samples import Value

_SEND_BUFFER = 1 << 20
_Memory = TypeVar("_Memory", Arena, WorkerStatusBoard, Completions)

_open_links: WeakSet[WorkerChannels] = WeakSet()
"""The channels of every loader alive in this process: a forked process must not keep their parent ends open."""


class WorkerChannels:
    """The memory, bells and sockets that the training process and its workers share.

    Owner -1 is the engine's arena, the others are those of the workers.
    """

    def __init__(
        self,
        workers: int,
        *,
        addressed: bool,
        arenas: bool,
        fetched: Arena | None = None,
        active: int | None = None,
        fields: socket.socket | None = None,
        prepared: tuple[socket.socket, Arena] | None = None,
    ) -> None:
        """``fetched``: where a reader process lays down what it has read. ``active``: workers that take tasks at first,
        if not all. ``fields``: where workers send the reader process what is to be kept; ``prepared``: where samples
        for other loaders, and the memory for them. All of these stay the reader's."""
        self.workers = workers
        self.loans = Loans()  # loans of all arenas
        self.fetched = fetched
        self.fields, self.prepared = fields, prepared
        active = workers if active is None else active
        with contextlib.ExitStack() as undo:
            self._open(arenas, workers - active, undo)
            self._connect(addressed, arenas, undo)
            undo.pop_all()
        self.board.words[ACTIVE] = active
        _open_links.add(self)

    def _open(self, arenas: bool, may_rest: int, undo: contextlib.ExitStack) -> None:
        """Makes memory and bells; ``undo`` closes them."""

        def owned(memory: _Memory) -> _Memory:
            undo.callback(memory.close)
            return memory

        def bell(flags: int = 0) -> int:
            fd = os.eventfd(0, os.EFD_CLOEXEC | flags)
            undo.callback(os.close, fd)
            return fd

        self.engine_arena = owned(Arena("engine", address_space.share(MOST, 4)))  # the window's batches
        each = address_space.share(MOST, 2 * max(4, self.workers))  # all together half of what is left
        names = [f"worker-{number}" for number in range(self.workers)] if arenas else []
        self.arenas = [owned(Arena(name, each)) for name in names]
        self.board = owned(WorkerStatusBoard(self.workers))
        self.completions = owned(Completions.open())
        self.wake = bell()
        self.consumer_wake = bell(os.EFD_NONBLOCK)
        self.bell = Bell(self.board, self.completions, self.wake, self.consumer_wake)
        # bells at which the last workers wait while they rest, by worker
        self.rests = {self.workers - 1 - at: bell() for at in range(may_rest)}

    def _connect(self, addressed: bool, arenas: bool, undo: contextlib.ExitStack) -> None:
        """Makes sockets; ``undo`` closes them."""

        def owned(pair: tuple[socket.socket, socket.socket]) -> tuple[socket.socket, socket.socket]:
            for end in pair:
                undo.callback(end.close)
            return pair

        pairs = [owned(_pair()) for _ in range(self.workers if addressed else 1)]
        self.task_senders = [pair[0] for pair in pairs]
        self.task_receivers = [pair[1] for pair in pairs]
        for sender in self.task_senders:
            sender.setblocking(False)
        # process workers write their stacks there
        stacks = [owned(socket.socketpair()) for _ in range(self.workers if arenas else 0)]
        self.stack_readers = [pair[0] for pair in stacks]
        self.stack_writers = [pair[1] for pair in stacks]
        # what must close when the parent dies
        self.parent_ends = [*self.task_senders, *self.stack_readers]
        self.late_ends: list[socket.socket] = []  # those too, but not before the workers have left

    def buffer(self, owner: int) -> memoryview:
        """Returns the mapping of the owner's arena."""
        return (self.engine_arena if owner < 0 else self.arenas[owner]).buffer

    def receiver(self, worker: int) -> socket.socket:
        """Returns where this worker's tasks arrive."""
        return self.task_receivers[worker % len(self.task_receivers)]

    def sender(self, worker: int) -> socket.socket:
        """Returns where tasks for this worker go (any worker, when tasks are not addressed)."""
        return self.task_senders[worker % len(self.task_senders)]

    def activate(self, workers: int) -> None:
        """Has so many workers take tasks from now on; one that waits for a task already may take one more."""
        self.board.words[ACTIVE] = workers
        self.board.fence()
        for worker, rest in self.rests.items():
            if worker < workers:
                os.eventfd_write(rest, 1)

    def close_parent_ends(self) -> None:
        """Closes the ends whose closing tells workers to leave. Idempotent."""
        for end in self.parent_ends:
            end.close()

    def close(self) -> None:
        """Closes everything in the parent; memory lives on while batches of it do. Idempotent."""
        _open_links.discard(self)
        for end in (*self.parent_ends, *self.late_ends, *self.task_receivers, *self.stack_writers):
            end.close()
        if self.wake >= 0:
            for fd in (self.wake, self.consumer_wake, *self.rests.values()):
                os.close(fd)
            self.wake = self.consumer_wake = -1
            self.board.close()
            self.completions.close()
            for arena in (self.engine_arena, *self.arenas):
                arena.close()

    # --- for start methods that pickle what they hand to a child ------------------------------------------

    def __getstate__(self) -> dict[str, Value]:
        nothing = dict.fromkeys(("parent_ends", "late_ends", "task_senders", "stack_readers"), ())
        fds = [reduction.DupFd(fd) for fd in (self.wake, self.consumer_wake, *self.rests.values())]
        return {**self.__dict__, **nothing, "loans": None, "bell": None, "fds": fds}

    def __setstate__(self, state: dict[str, Value]) -> None:
        fds = [fd.detach() for fd in state.pop("fds")]
        self.__dict__.update(state)
        self.wake, self.consumer_wake, *rests = fds
        self.rests = dict(zip(self.rests, rests, strict=True))
        self.bell = Bell(self.board, self.completions, self.wake, self.consumer_wake)


def _attached(kind: Callable[..., Value], fd: Value, *arguments: Value) -> Value:
    """Attaches a child to the same shared memory."""
    return kind(*arguments, fd=fd.detach())


_Pickler = reduction.ForkingPickler
_Pickler.register(Arena, lambda each: (_attached, (Arena, reduction.DupFd(each.fd), "attached", each.capacity)))
_Pickler.register(Completions, lambda each: (_attached, (Completions, reduction.DupFd(each.fd), each.capacity)))
_Pickler.register(
    WorkerStatusBoard, lambda each: (_attached, (WorkerStatusBoard, reduction.DupFd(each.fd), each.workers))
)


def _close_inherited_ends() -> None:
    """Closes, in a freshly forked process, the parent's ends of every loader.

    Otherwise their workers would go on after the parent has died.
    """
    for links in list(_open_links):
        with contextlib.suppress(OSError):
            links.close_parent_ends()
            for end in links.late_ends:
                end.close()


os.register_at_fork(after_in_child=_close_inherited_ends)


def _pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    return pair
