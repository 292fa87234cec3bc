"""An agent: what runs on another machine (``minato-gpu lane``) and prepares samples there for loaders that connect.

One process listens, and has no other thread. For each loader that connects it forks a session, which meets the loader
(greeting.py), receives data set and pipeline once, and runs a normal process lane: leases, deaths, hangs and revocation
are settled there. Samples that fit rows are written into a slab of the session's and sent from there.

A session ends with its connection, with the agent, and where nothing has come from the loader for a minute; its workers
end with it. Tasks beyond what the loader has received, by ``node_budget`` bytes, wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import connection, spawn
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from minato_gpu.lanes.base import Blob, Handed, Item, Report, Task
from minato_gpu.lanes.contract import Exit, Message, Number, Progress, Recalled
from minato_gpu.lanes.far import greeting
from minato_gpu.lanes.far.frames import FrameSocket, between, bytes_of_rows
from minato_gpu.lanes.process_lane import ProcessLane
from minato_gpu.lanes.produce import Job
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory.status_board import ATTENTION, CONSUMER
from minato_gpu.sources import cluster_token
from minato_gpu.util.threads import usable_cores

BEAT_S = 0.2  # between two frames that say no more than that this end lives
SILENT_S = 60.0  # after which a loader is taken for gone
_MOST_SESSIONS = 256
_FORK = multiprocessing.get_context("fork")
_PR_SET_PDEATHSIG = 1


class Shipment(NamedTuple):
    """What goes to an agent once. ``job``: pickled; ``paths``: where its modules are; ``main``: the program's own file,
    by ``init_main_from_path`` or ``init_main_from_name``, where the job needs it (see multiprocessing.spawn)."""

    job: bytes
    paths: tuple[str, ...]
    main: dict[str, str]
    node_budget: int
    workers: int
    lane: str

    def unpack(self) -> Job:
        """The job. Raises whatever unpickling it does."""
        sys.path += [path for path in self.paths if path not in sys.path and Path(path).exists()]
        spawn.prepare(self.main)
        job: Job = pickle.loads(self.job)
        return replace(job, lane=self.lane, num_workers=self.workers)


def serve(host: str, port: int, cores: int, listening: Callable[[str], None], *, tied: bool = False) -> None:
    """Listens there until this process is ended. ``cores``: workers that a loader may have (0: one a core).
    ``listening`` is called with the address. ``tied``: it ends when standard input is closed.

    Raises ValueError where the environment has no token, OSError where the port is taken.
    """
    cluster_token.token()
    hello = greeting.own_hello(cores=cores or usable_cores())
    with socket.create_server((host, port), backlog=64) as listener:
        listening("{}:{}".format(*listener.getsockname()[:2]))
        sessions: list[Any] = []
        while True:
            ends = [each.sentinel for each in sessions]
            ready = connection.wait([listener, *ends, *([sys.stdin.fileno()] if tied else [])])
            if tied and sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 1024):
                break
            sessions = [each for each in sessions if each.exitcode is None]
            if listener in ready:
                end, _ = listener.accept()
                if len(sessions) < _MOST_SESSIONS:
                    session = _FORK.Process(target=_session, args=(listener, end, hello, os.getpid()))
                    session.start()
                    sessions.append(session)
                end.close()
        for session in sessions:
            session.kill()


def _session(listener: socket.socket, end: socket.socket, hello: greeting.Hello, parent: int) -> None:
    """In a process of its own: everything for one loader."""
    listener.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the agent's, which ends this process
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    try:
        if greeting.answer(end, hello) is None:
            return
        end.settimeout(SILENT_S)
        wire, first = FrameSocket(end), None
        while wire.open and first is None:
            select.select([end], [], [], SILENT_S)
            first = next(wire.receive(), None)  # commands may follow at once
    except OSError:  # whoever it was has gone, or says nothing that a loader says
        return
    if first is not None:
        _work(wire, first[0])


def _work(wire: FrameSocket, shipment: Shipment) -> None:
    try:
        job = shipment.unpack()
        session = AgentSession(wire, job, shipment.node_budget)
    except Exception as error:
        wire.send("error", f"{type(error).__name__}: {error}", perf_counter())
        while wire.open and wire.unsent:
            select.select([], [wire.end], [], SILENT_S)
            wire.flush()
        return
    with contextlib.closing(session):
        session.serve()


class AgentSession:
    """One loader's lane, at the end of a connection. ``budget``: unsent bytes beyond which no task is begun."""

    def __init__(self, wire: FrameSocket, job: Job, budget: int) -> None:
        self._wire, self._budget = wire, budget
        self._links = links = WorkerChannels(job.num_workers, addressed=False, arenas=True)
        links.board.words[ATTENTION] = CONSUMER
        links.late_ends.append(wire.end)  # no worker is to keep the connection open
        self._lane = ProcessLane(links, job, _FORK, replaceable=job.repeats)
        self._store = Store(-1, links)
        self._waiting: deque[tuple[Task, Sequence[bool]]] = deque()  # beyond the budget
        self._tasks: dict[Number, Task] = {}  # that workers have
        self._used: deque[tuple[int, list[int]]] = deque()  # slabs that are free once so many bytes have been sent
        self._asked = False  # somebody wants to know what the workers are at
        self._beaten = 0.0
        self._dead: set[int] = set()  # workers that have not been replaced

    def serve(self) -> None:
        """Until the connection is closed."""
        wire, links, lane, poll = self._wire, self._links, self._lane, select.poll()
        for fd in (*lane.fds(), *lane.fault_fds()):
            poll.register(fd, select.POLLIN)
        while wire.open and perf_counter() < wire.heard + SILENT_S:
            lane.sleep(every_task=True)
            if not links.bell.await_tickets(*links.completions.ready_anywhere, 1):
                poll.register(wire.end, select.POLLIN | (select.POLLOUT if wire.unsent else 0))
                poll.poll(1e3 * BEAT_S)
            wire.flush()
            for name, *arguments in wire.receive():
                getattr(self, f"_do_{name}")(*arguments)
            self._begin_tasks()
            for message in (*lane.receive(), *lane.leases.reports(unfinished=True)):
                self._tell(message)
            while self._used and self._used[0][0] <= wire.sent:
                for slab in self._used.popleft()[1]:
                    links.engine_arena.free(slab)
            if perf_counter() > self._beaten + BEAT_S:
                self._send("beat")

    def close(self) -> None:
        """Ends the workers."""
        self._lane.close(0.0)
        self._links.close()
        self._wire.close()

    # --- commands ------------------------------------------------------------------------------------------

    def _do_beat(self) -> None:
        """The loader lives."""

    def _do_send(self, task: Task, rowed: Sequence[bool]) -> None:
        """``rowed``: of which pieces the samples have rows there."""
        self._waiting.append((task, rowed))

    def _do_recall(self) -> None:
        """Always answered."""
        self._lane.recall()
        waiting = tuple((task.run, task.chunk) for task, _ in self._waiting)
        self._waiting.clear()
        self._send("told", Recalled(waiting))

    def _do_revoke(self, run: int, chunk: int, keep: int) -> None:
        self._lane.revoke(run, chunk, keep)

    def _do_hand_over(self, run: int, chunk: int, splits: Sequence[int]) -> None:
        self._lane.hand_over(run, chunk, splits)

    def _do_look(self) -> None:
        self._asked = True
        self._lane.look()

    def _do_replace(self, worker: int) -> None:
        if worker in self._dead:  # else it is asked for by who has lost an earlier session
            self._dead.discard(worker)
            self._lane.replace(worker, ())  # what the dead one had stored is sent, or lost

    def _do_kill(self, worker: int, hung: str) -> None:
        self._lane.kill(worker, hung)

    def _do_describe(self, number: int, what: str, *arguments: int) -> None:
        """In a thread: stacks take a moment, in which this end must not fall silent."""
        threading.Thread(target=self._describe, args=(number, what, *arguments), daemon=True).start()

    def _describe(self, number: int, what: str, *arguments: int) -> None:
        self._send("described", number, getattr(self._lane, what)(*arguments))

    # --- tasks and what comes of them ----------------------------------------------------------------------

    def _begin_tasks(self) -> None:
        while self._waiting and self._wire.unsent <= self._budget:
            task, rowed = self._waiting.popleft()
            pieces = []
            for piece, has_rows in zip(task.pieces, rowed, strict=True):
                rows = len(piece.keys)
                piece = piece._replace(marks=self._links.completions.reserve(rows))
                if has_rows and task.layout:
                    nbytes = self._store.layout(task.layout).offsets(rows)[1]
                    piece = piece._replace(slab=self._links.engine_arena.allocate(nbytes), rows=rows)
                pieces.append(piece)
            self._tasks[task.run, task.chunk] = task = task._replace(pieces=tuple(pieces))
            self._lane.send(task)

    def _send(self, *head: Any, body: Sequence[memoryview] = ()) -> None:
        self._beaten = perf_counter()
        self._wire.send(*head, self._beaten, body=body)

    def _tell(self, message: Message) -> None:
        if isinstance(message, Report):
            task = self._tasks[message.run, message.chunk]
            self._send("samples", message, body=self._body(task, message))
            if message.final:
                self._end((message.run, message.chunk))
        elif isinstance(message, Progress):
            if self._asked:
                self._asked = False
                self._send("told", message)
        else:
            self._send("told", message)
            for number in message.tasks if isinstance(message, Recalled) else ():
                self._end(number)
            if isinstance(message, Exit):
                self._dead.add(message.number)
                self._end(message.claim[:2])

    def _body(self, task: Task, report: Report) -> list[memoryview]:
        """The bytes of the report's rows, then those of its blobs."""
        body: list[memoryview] = []
        if in_rows(report):
            sizes = [len(piece.keys) for piece in task.pieces]
            for number, begin, end in between(sizes, report.first, report.done):
                piece = task.pieces[number]
                if piece.slab >= 0 and task.layout:
                    body += bytes_of_rows(self._store.views(piece.slab, piece.rows, task.layout), begin, end)
        for blob in filter(None, map(blob_of, report.items or ())):
            buffer = self._links.buffer(blob.worker)
            for offset, nbytes in blob.blocks:
                body.append(memoryview(bytes(buffer[offset : offset + nbytes])))  # the worker may die before it is sent
                self._lane.leases.give_back(blob.worker, offset)
        return body

    def _end(self, number: Number) -> None:
        """Nobody is at this task any more: its slabs are free when they have been sent."""
        task = self._tasks.pop(number, None)
        if task is None:
            return
        for piece in task.pieces:
            self._links.completions.give_back(piece.marks)
        self._used.append((self._wire.queued, [piece.slab for piece in task.pieces if piece.slab >= 0]))


def blob_of(item: Item) -> Blob | None:
    """Returns what is stored in an arena for a sample, a batch, or a part of a sample."""
    stored = item.fields if isinstance(item, Handed) else item
    return stored if isinstance(stored, Blob) else None


def in_rows(report: Report) -> bool:
    """Whether rows of the samples are sent: where any may be stored there. Those of others are sent along."""
    return report.items is None or any(blob_of(item) is None for item in report.items)
