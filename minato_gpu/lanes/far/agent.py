"""An agent: what runs on another machine (``minato-gpu lane``) and prepares samples there for loaders that connect.

One process listens, and has no other thread. For each loader that connects it forks a session, which runs a normal
process lane, and sends that lane's messages and samples. A session ends with its connection, with the agent, and where
the loader's machine answers nothing for a minute; its workers end with it.

Leases, deaths, hangs and revocation are settled by the lane there. Samples that fit rows are written into a slab of the
session's and sent from there. Sending waits while the loader takes nothing. Once the tasks that workers have take
``node_budget`` bytes of rows, others wait for them to end, as long as every worker has one.
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
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import connection, spawn
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from minato_gpu.lanes.base import Report, Task
from minato_gpu.lanes.contract import Exit, Message, Number, Recalled
from minato_gpu.lanes.far import wire
from minato_gpu.lanes.far.reads import TaskReads
from minato_gpu.lanes.far.samples import blob_of, rows_of
from minato_gpu.lanes.process_lane import ProcessLane
from minato_gpu.lanes.produce import Job
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory.status_board import ATTENTION, CONSUMER
from minato_gpu.sources import cluster_token
from minato_gpu.sources.source import source_of
from minato_gpu.util.threads import usable_cores

BEAT_S = 0.2  # between two frames that say no more than that this end lives
_SILENT_S = 60.0  # after which a loader is taken for gone
_MOST_SESSIONS = 256
_FORK = multiprocessing.get_context("fork")
_PR_SET_PDEATHSIG = 1


class Shipment(NamedTuple):
    """The first message to an agent on each connection.

    ``job``: pickled; ``paths``: where its modules are; ``main``: the program's own file, by ``init_main_from_path``
    or ``init_main_from_name``, where the job needs it (see multiprocessing.spawn). ``node_budget``: bytes, see
    ``Lanes``. ``workers``: how many the agent is to start. ``lane``: what the loader calls the agent's lane.
    """

    job: bytes
    paths: tuple[str, ...]
    main: dict[str, str]
    node_budget: int
    workers: int
    lane: str

    def unpack(self) -> Job:
        """Returns the job, for ``lane`` and ``workers``. Raises whatever unpickling it does.

        Before that ``paths`` are added to ``sys.path``, and the program's own file is imported.
        """
        sys.path += [path for path in self.paths if path not in sys.path and Path(path).exists()]
        spawn.prepare(self.main)
        job: Job = pickle.loads(self.job)
        return replace(job, lane=self.lane, num_workers=self.workers)


class AgentSession:
    """The agent's side of one connection: the lane that prepares the samples of one loader."""

    def __init__(self, connected: wire.FrameSocket, shipment: Shipment) -> None:
        job = shipment.unpack()
        self._wire, self._budget, self._workers = connected, shipment.node_budget, shipment.workers
        declared = source_of(job.dataset)
        self._reads = None if declared is None else TaskReads(declared, job.num_workers)
        fetched = None if self._reads is None else self._reads.reader.arena
        self._links = links = WorkerChannels(job.num_workers, addressed=False, arenas=True, fetched=fetched)
        links.board.words[ATTENTION] = CONSUMER
        links.late_ends.append(connected.end)  # no worker is to keep the connection open
        self._lane = ProcessLane(links, job, _FORK, replaceable=job.repeats)
        self._store = Store(-1, links)
        self._waiting: dict[Number, Task] = {}  # tasks that wait for the budget, or for their sources
        self._tasks: dict[Number, tuple[Task, int]] = {}  # tasks that workers have, each with the bytes of its rows
        self._nbytes = 0  # bytes of the rows of all these tasks
        self._beaten = 0.0
        self._dead: set[int] = set()  # workers that have not been replaced

    def serve(self) -> None:
        """Works until the connection ends, and raises the OSError that says so."""
        links, lane, own, poll = self._links, self._lane, self._wire.end.fileno(), select.poll()
        for fd in (links.consumer_wake, *lane.fault_fds(), own):
            poll.register(fd, select.POLLIN)
        if self._reads is not None:
            poll.register(self._reads.reader.end, select.POLLIN)
        while True:
            lane.sleep(every_task=True)
            is_ready = links.bell.await_tickets(*links.completions.ready_anywhere, 1)
            if own in [fd for fd, _ in poll.poll(0 if is_ready else 1e3 * BEAT_S)]:
                name, *arguments = self._wire.receive()
                (getattr(self, f"_do_{name}", None) or getattr(lane, name))(*arguments)
            self._begin_tasks()
            for message in (*lane.receive(), *lane.leases.reports(unfinished=True)):
                self._tell(message)
            if perf_counter() > self._beaten + BEAT_S:
                self._send("beat")

    def close(self) -> None:
        """Kills the workers, ends the process that reads ahead, and closes the connection."""
        self._lane.close(0.0)
        if self._reads is not None:
            self._reads.reader.close()
        self._links.close()
        self._wire.close()

    # --- commands ------------------------------------------------------------------------------------------

    def _do_send(self, task: Task) -> None:
        """Takes a task; pieces have ``rows`` where the loader has rows for their samples."""
        if self._reads is not None:
            self._reads.want(task)
        self._waiting[task.run, task.chunk] = task

    def _do_recall(self) -> None:
        self._lane.recall()
        self._give_back(tuple(self._waiting))

    def _do_revoke(self, run: int, chunk: int, keep: int) -> None:
        if (run, chunk) in self._waiting:  # nothing of it has been done
            self._give_back(((run, chunk),))
        self._lane.revoke(run, chunk, keep)

    def _give_back(self, numbers: tuple[Number, ...]) -> None:
        """Sends back tasks that have not been given to workers."""
        for number in numbers:
            task = self._waiting.pop(number)
            if self._reads is not None:
                self._reads.release(task)
        self._send("message", Recalled(numbers))

    def _do_replace(self, worker: int) -> None:
        if worker in self._dead:  # else it is asked for by who has lost an earlier session
            self._dead.discard(worker)
            self._lane.replace(worker, ())  # what the dead one had stored is sent, or lost

    def _do_describe(self, what: str, *arguments: int) -> None:
        """Sends the stacks of workers, from a thread: finding them takes a moment, in which this end must not fall
        silent."""
        describe = getattr(self._lane, what)
        threading.Thread(target=lambda: self._send("described", describe(*arguments)), daemon=True).start()

    # --- tasks and what comes of them ----------------------------------------------------------------------

    def _begin_tasks(self) -> None:
        """Hands tasks to the lane: as many as the budget and their sources allow."""
        if self._reads is not None:
            self._reads.receive()
        for number, task in list(self._waiting.items()):
            if len(self._tasks) >= self._workers and self._nbytes >= self._budget:
                return
            filled = task if self._reads is None else self._reads.filled(task)
            if filled is None:
                continue
            del self._waiting[number]
            pieces, taken = [], 0
            for piece in filled.pieces:
                piece = piece._replace(marks=self._links.completions.reserve(len(piece.keys)))
                if piece.rows and task.layout:
                    nbytes = self._store.layout(task.layout).offsets(piece.rows)[1]
                    piece = piece._replace(slab=self._links.engine_arena.allocate(nbytes))
                    taken += nbytes
                pieces.append(piece)
            filled = filled._replace(pieces=tuple(pieces))
            self._tasks[number] = filled, taken
            self._nbytes += taken
            self._lane.send(filled)

    def _send(self, *head: Any, body: Sequence[memoryview] = ()) -> None:
        self._beaten = perf_counter()
        self._wire.send(*head, self._beaten, body=body)

    def _tell(self, message: Message) -> None:
        """Sends a message of the lane; with a report, its samples."""
        if isinstance(message, Report):
            number = message.run, message.chunk
            body, blobs = rows_of(self._tasks[number][0], message, self._store), map(blob_of, message.items or ())
            blocks = [(blob.worker, *block) for blob in blobs if blob is not None for block in blob.blocks]
            body += [self._links.buffer(worker)[offset : offset + nbytes] for worker, offset, nbytes in blocks]
            self._send("samples", message, body=body)
            for worker, offset, _ in blocks:
                self._lane.leases.give_back(worker, offset)
            ended: tuple[Number, ...] = (number,) if message.final else ()
        else:
            self._send("message", message)
            ended = message.tasks if isinstance(message, Recalled) else ()
            if isinstance(message, Exit):
                self._dead.add(message.number)
                ended = (message.claim[:2],)
        for number in ended:
            self._end(number)

    def _end(self, number: Number) -> None:
        """Frees the memory of a task that no worker is at any more."""
        if number not in self._tasks:
            return
        task, taken = self._tasks.pop(number)
        self._nbytes -= taken
        if self._reads is not None:
            self._reads.release(task)
        for piece in task.pieces:
            self._links.completions.give_back(piece.marks)
            if piece.slab >= 0:
                self._links.engine_arena.free(piece.slab)


# --- the process that listens ------------------------------------------------------------------------------------


def serve(host: str, port: int, cores: int, listening: Callable[[str], None], *, tied: bool = False) -> None:
    """Listens at ``host`` and ``port`` until this process is ended. ``cores``: workers that a loader may have (0: one a
    core). ``listening`` is called once with the address. ``tied``: it ends when standard input is closed, and what is
    printed after ``listening`` goes to standard error.

    Raises ValueError where the environment has no token, OSError where the port is taken.
    """
    cluster_token.token()
    hello = wire.own_hello(cores=cores or usable_cores())
    with socket.create_server((host, port), backlog=64) as listener:
        listening("{}:{}".format(*listener.getsockname()[:2]))
        if tied:  # nobody reads on where the address was said: workers that print would wait there for ever
            os.dup2(2, 1)
        sessions: list[Any] = []
        while True:
            ends = [each.sentinel for each in sessions]
            ready = connection.wait([listener, *ends, *([sys.stdin.fileno()] if tied else [])])
            if tied and sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 1024):
                break
            sessions = [each for each in sessions if each.exitcode is None]
            if listener in ready:
                end, _ = listener.accept()
                with end, contextlib.suppress(OSError):  # no room for a process: the loader comes again
                    if len(sessions) < _MOST_SESSIONS:
                        session = _FORK.Process(target=_session, args=(listener, end, hello, os.getpid()))
                        session.start()
                        sessions.append(session)
        for session in sessions:
            session.kill()


def _session(listener: socket.socket, end: socket.socket, hello: wire.Hello, parent: int) -> None:
    """Serves one loader, in a process of its own, until the connection ends."""
    listener.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the agent's, which ends this process
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    with contextlib.suppress(OSError):  # whoever it was has gone, or says nothing that a loader says
        end.settimeout(wire.LIMIT_S)
        connected = wire.FrameSocket(end)
        if not wire.answer(connected, hello):
            return
        end.settimeout(_SILENT_S)
        (shipment,) = connected.receive()
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * _SILENT_S))
        try:
            session = AgentSession(connected, shipment)
        except Exception as error:
            connected.send("error", f"{type(error).__name__}: {error}", perf_counter())
            end.shutdown(socket.SHUT_WR)
            while end.recv(1 << 16):  # what is closed with something unread loses what it has sent
                pass
            return
        with contextlib.closing(session):
            session.serve()
