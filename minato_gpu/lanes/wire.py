"""Messages between the engine and CPU workers: pickled tuples through sockets, or objects through queues.

A message larger than a socket takes travels through an arena: the worker's own for a report, the engine's for a
task (which the engine frees when the chunk is through).
"""

from __future__ import annotations

import pickle
import queue
import struct
from collections import deque
from multiprocessing.reduction import ForkingPickler
from typing import Protocol

import numpy as np

from minato_gpu.lanes.base import Report, Task
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory import blobs

LARGE = 96 * 1024
BUFFER = 1 << 18
HEAD = struct.Struct("qq")  # run and chunk of a task, before its pickle: read in the inbox of a worker that died


class Channel(Protocol):
    """The worker's side: tasks in, reports out."""

    def receive(self) -> Task | None:
        """The next task; None when there will be none."""

    def send(self, report: Report) -> None:
        """Publish a report; may block while the engine has much to read."""


class SocketChannel:
    """For worker processes."""

    def __init__(self, links: WorkerChannels, worker: int) -> None:
        self._links = links
        self._worker = worker
        self._tasks = links.receiver(worker)
        self._reports = links.report_sender
        self._inbox = links.board.inbox(worker)

    def receive(self) -> Task | None:
        if not self._tasks.recv_into(self._inbox):
            return None
        message = pickle.loads(self._inbox[HEAD.size :])
        if len(message) == 2:
            offset, nbytes = message
            message = pickle.loads(bytes(np.ndarray((nbytes,), np.uint8, self._links.buffer(-1), offset)))
        return Task(*message)

    def send(self, report: Report) -> None:
        plain = report.items is None
        # what is none of the data set's own needs none of multiprocessing's reducers, which take five microseconds
        data = pickle.dumps(tuple(report)) if plain else bytes(ForkingPickler.dumps(tuple(report)))
        if len(data) > LARGE:
            arena = self._links.arenas[self._worker]
            dumped = blobs.dump(tuple(report))
            offset = arena.allocate(dumped.nbytes)
            blobs.write(arena.buffer[offset : offset + dumped.nbytes], dumped)
            data = pickle.dumps((self._worker, offset, dumped.nbytes))
        try:
            self._reports.send(data)
        except ConnectionError:
            return  # the loader has closed; the next receive says so
        self._links.bell.ring()


class QueueChannel:
    """For worker threads, which share objects with the engine."""

    def __init__(self, links: WorkerChannels) -> None:
        self._links = links
        self.tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self.reports: deque[Report] = deque()

    def receive(self) -> Task | None:
        return self.tasks.get()

    def send(self, report: Report) -> None:
        self.reports.append(report)
        self._links.bell.ring()
