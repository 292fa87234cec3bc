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
import pickle
import socket
import struct
from itertools import accumulate
from multiprocessing import reduction
from weakref import WeakSet

from minato_gpu.lanes.base import Task
from minato_gpu.lanes.stacks import Stacks
from minato_gpu.memory.arena import MOST as ARENA
from minato_gpu.memory.arena import PAGE, Arena, round_up
from minato_gpu.memory.completions import MOST as MARKS
from minato_gpu.memory.completions import TICKET_BYTES, Bell, Completions
from minato_gpu.memory.loans import Loans
from minato_gpu.memory.shared_memory import SharedMemory
from minato_gpu.memory.status_board import ACTIVE, ATTENTION, NOBODY, WorkerStatusBoard
from minato_gpu.samples import Value

_SEND_BUFFER = 1 << 20
HEAD = struct.Struct("qq")  # run and chunk of a task, before its pickle: read in the inbox of a worker that died
LARGE = 96 * 1024  # bytes; a larger task travels through the engine's arena, and is freed when its chunk is through

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
        """``addressed``: each task is for a certain worker. ``arenas``: workers are processes, with an arena each.
        ``active``: workers that take tasks at first, if not all.

        The others are the reader process's, and are not closed here. ``fetched``: where it stores what it has read.
        ``fields``: the socket to it for fields to be kept; ``prepared``: that for samples for other loaders, and the
        memory of these."""
        self.workers = workers
        self.loans = Loans()  # loans of all arenas
        self.fetched = fetched
        self.fields, self.prepared = fields, prepared
        active = workers if active is None else active
        with contextlib.ExitStack() as undo:
            self._reserve(arenas)
            undo.callback(self.memory.close)
            self._connect(addressed, arenas, workers - active, undo)
            undo.pop_all()
        self.board.clear()
        self.board.words[ACTIVE] = active
        self.bell = Bell(self.board, self.completions, self.wake, self.consumer_wake)
        _open_links.add(self)

    def _reserve(self, arenas: bool) -> None:
        """Makes the memory of all arenas, marks and the board."""
        count = 1 + (self.workers if arenas else 0)  # the first is the engine's, of the window's batches
        board = round_up(WorkerStatusBoard.size(self.workers), PAGE)
        self.memory, self._sizes = SharedMemory.reserve("loader", [ARENA] * count + [MARKS, board])
        self._divide()

    def _divide(self) -> None:
        """Makes arenas, marks and the board of the memory."""
        memory, begins = self.memory, [*accumulate(self._sizes, initial=0)]
        arenas = [
            Arena("", size, memory=memory, begin=begin) for size, begin in zip(self._sizes[:-2], begins, strict=False)
        ]
        self.engine_arena, *self.arenas = arenas
        marks, board = self._sizes[-2:]
        self.completions = Completions(marks // TICKET_BYTES, memory.part(begins[-3], marks))
        self.board = WorkerStatusBoard(self.workers, memory.part(begins[-2], board))

    def _connect(self, addressed: bool, arenas: bool, may_rest: int, undo: contextlib.ExitStack) -> None:
        """Makes bells and sockets; ``undo`` closes them."""

        def bell(flags: int = 0) -> int:
            fd = os.eventfd(0, os.EFD_CLOEXEC | flags)
            undo.callback(os.close, fd)
            return fd

        def owned(pair: tuple[socket.socket, socket.socket]) -> tuple[socket.socket, socket.socket]:
            for end in pair:
                undo.callback(end.close)
            return pair

        self.wake = bell()
        self.consumer_wake = bell(os.EFD_NONBLOCK)
        # bells at which the last workers wait while they rest, by worker
        self.rests = {self.workers - 1 - at: bell() for at in range(may_rest)}
        pairs = [owned(_pair()) for _ in range(self.workers if addressed else 1)]
        self.task_senders = [pair[0] for pair in pairs]  # one for all workers, or one for each
        self.task_receivers = [pair[1] for pair in pairs]
        for sender in self.task_senders:
            sender.setblocking(False)
        # what must close when the parent dies
        self.parent_ends = [*self.task_senders]
        self.child_ends = [*self.task_receivers]
        self.late_ends: list[socket.socket] = []  # those too, but not before the workers have left
        if arenas:  # process workers write their stacks there
            reader, self.stack_writer = owned(socket.socketpair())
            self.stacks = Stacks(reader)
            self.parent_ends.append(reader)
            self.child_ends.append(self.stack_writer)

    def buffer(self, owner: int) -> memoryview:
        """Returns the mapping of the owner's arena."""
        return (self.engine_arena if owner < 0 else self.arenas[owner]).buffer

    def receive(self, worker: int) -> Task | None:
        """Waits for a worker process's next task; returns None when there will be none."""
        inbox = self.board.inbox(worker)
        if not self.task_receivers[worker % len(self.task_receivers)].recv_into(inbox):
            return None
        message = pickle.loads(inbox[HEAD.size :])
        if len(message) == 2:
            offset, nbytes = message
            message = pickle.loads(bytes(self.engine_arena.buffer[offset : offset + nbytes]))
        return Task(*message)

    def announce(self, *, opened: bool) -> None:
        """Wakes the thread that waits for what lanes tell; if none does, the pump thread for a lane that has
        ``opened``."""
        if opened and self.board.words[ATTENTION] == NOBODY:
            os.eventfd_write(self.wake, 1)
        else:
            self.bell.ring()

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
        for end in (*self.parent_ends, *self.late_ends, *self.child_ends):
            end.close()
        if self.wake >= 0:
            for fd in (self.wake, self.consumer_wake, *self.rests.values()):
                os.close(fd)
            self.wake = self.consumer_wake = -1
            self.board.close()
            self.completions.close()
            for owner, arena in enumerate(self.arenas):  # only what the consumer still has is left of them
                arena.forsake(self.loans.lent_by(owner))
            for arena in (self.engine_arena, *self.arenas):
                arena.close()
            self.memory.close()

    # --- for start methods that pickle what they hand to a child ------------------------------------------

    def __getstate__(self) -> dict[str, Value]:
        left = {"parent_ends", "child_ends", "late_ends", "task_senders", "stacks", "loans", "bell"}
        left |= {"engine_arena", "arenas", "completions", "board"}
        state = {name: value for name, value in self.__dict__.items() if name not in left}
        return {**state, "fds": [reduction.DupFd(fd) for fd in (self.wake, self.consumer_wake, *self.rests.values())]}

    def __setstate__(self, state: dict[str, Value]) -> None:
        fds = [fd.detach() for fd in state.pop("fds")]
        self.__dict__.update(state)
        self._divide()
        self.wake, self.consumer_wake, *rests = fds
        self.rests = dict(zip(self.rests, rests, strict=True))
        self.bell = Bell(self.board, self.completions, self.wake, self.consumer_wake)


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
