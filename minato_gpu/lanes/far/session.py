"""An agent's work for one loader: a process lane, whose messages and samples it sends.

Leases, deaths, hangs and revocation are settled by the lane here. Samples that fit rows are written into a slab of the
session's and sent from there. Sending waits while the loader takes nothing; tasks that would take more than
``node_budget`` bytes of rows wait for others to end, as long as every worker has one.
"""

from __future__ import annotations

import multiprocessing
import pickle
import select
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import spawn
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from minato_gpu.lanes.base import Report, Task
from minato_gpu.lanes.contract import Exit, Message, Number, Recalled
from minato_gpu.lanes.far.frames import FrameSocket
from minato_gpu.lanes.far.reads import TaskReads
from minato_gpu.lanes.far.samples import blob_of, rows_of
from minato_gpu.lanes.process_lane import ProcessLane
from minato_gpu.lanes.produce import Job
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory.status_board import ATTENTION, CONSUMER
from minato_gpu.sources.source import source_of

BEAT_S = 0.2  # between two frames that say no more than that this end lives
_FORK = multiprocessing.get_context("fork")


class Shipment(NamedTuple):
    """The first message to an agent on each connection.

    ``job``: pickled; ``paths``: where its modules are; ``main``: the program's own file, by ``init_main_from_path``
    or ``init_main_from_name``, where the job needs it (see multiprocessing.spawn).
    """

    job: bytes
    paths: tuple[str, ...]
    main: dict[str, str]
    node_budget: int
    workers: int
    lane: str

    def unpack(self) -> Job:
        """Returns the job. Raises whatever unpickling it does."""
        sys.path += [path for path in self.paths if path not in sys.path and Path(path).exists()]
        spawn.prepare(self.main)
        job: Job = pickle.loads(self.job)
        return replace(job, lane=self.lane, num_workers=self.workers)


class AgentSession:
    """The agent's side of one connection: the lane that prepares the samples of one loader."""

    def __init__(self, wire: FrameSocket, shipment: Shipment) -> None:
        job = shipment.unpack()
        self._wire, self._budget, self._workers = wire, shipment.node_budget, shipment.workers
        declared = source_of(job.dataset)
        self._reads = None if declared is None else TaskReads(declared, job.num_workers)
        fetched = None if self._reads is None else self._reads.reader.arena
        self._links = links = WorkerChannels(job.num_workers, addressed=False, arenas=True, fetched=fetched)
        links.board.words[ATTENTION] = CONSUMER
        links.late_ends.append(wire.end)  # no worker is to keep the connection open
        self._lane = ProcessLane(links, job, _FORK, replaceable=job.repeats)
        self._store = Store(-1, links)
        # tasks that wait for the budget, or for their sources
        self._waiting: dict[Number, tuple[Task, Sequence[bool]]] = {}
        self._tasks: dict[Number, tuple[Task, int]] = {}  # tasks that workers have, each with the bytes of its rows
        self._nbytes = 0  # bytes of the rows of all these tasks
        self._beaten = 0.0
        self._dead: set[int] = set()  # workers that have not been replaced

    def serve(self) -> None:
        """Works until the connection ends, and raises the OSError that says so."""
        wire, links, lane, poll = self._wire, self._links, self._lane, select.poll()
        for fd in (*lane.fds(), *lane.fault_fds(), wire.end.fileno()):
            poll.register(fd, select.POLLIN)
        if self._reads is not None:
            poll.register(self._reads.reader.end, select.POLLIN)
        while True:
            lane.sleep(every_task=True)
            is_ready = links.bell.await_tickets(*links.completions.ready_anywhere, 1)
            if wire.end.fileno() in [fd for fd, _ in poll.poll(0 if is_ready else 1e3 * BEAT_S)]:
                name, *arguments = wire.receive()
                (getattr(self, f"_do_{name}", None) or getattr(lane, name))(*arguments)
            self._begin_tasks()
            for message in (*lane.receive(), *lane.leases.reports(unfinished=True)):
                self._tell(message)
            if perf_counter() > self._beaten + BEAT_S:
                self._send("beat")

    def close(self) -> None:
        """Ends the workers."""
        self._lane.close(0.0)
        if self._reads is not None:
            self._reads.reader.close()
        self._links.close()
        self._wire.close()

    # --- commands ------------------------------------------------------------------------------------------

    def _do_send(self, task: Task, rowed: Sequence[bool]) -> None:
        """Takes a task. ``rowed``: for each of its pieces, whether the loader has rows for the samples."""
        if self._reads is not None:
            self._reads.want(task)
        self._waiting[task.run, task.chunk] = task, rowed

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
            task, _ = self._waiting.pop(number)
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
        for number, (task, rowed) in list(self._waiting.items()):
            if len(self._tasks) >= self._workers and self._nbytes >= self._budget:
                return
            filled = task if self._reads is None else self._reads.filled(task)
            if filled is None:
                continue
            del self._waiting[number]
            pieces, taken = [], 0
            for piece, has_rows in zip(filled.pieces, rowed, strict=True):
                rows = len(piece.keys)
                piece = piece._replace(marks=self._links.completions.reserve(rows))
                if has_rows and task.layout:
                    nbytes = self._store.layout(task.layout).offsets(rows)[1]
                    piece = piece._replace(slab=self._links.engine_arena.allocate(nbytes), rows=rows)
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
