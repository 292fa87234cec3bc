"""Tasks for worker processes: pickled tuples through sockets.

A task larger than a socket takes travels through the engine's arena, and is freed when the chunk is through.
"""

from __future__ import annotations

import pickle
import struct

import numpy as np

from minato_gpu.lanes.base import Task
from minato_gpu.lanes.worker_channels import WorkerChannels

LARGE = 96 * 1024
BUFFER = 1 << 18
HEAD = struct.Struct("qq")  # run and chunk of a task, before its pickle: read in the inbox of a worker that died


class SocketChannel:
    """The worker's end of the socket of tasks."""

    def __init__(self, links: WorkerChannels, worker: int) -> None:
        self._links = links
        self._tasks = links.receiver(worker)
        self._inbox = links.board.inbox(worker)

    def receive(self) -> Task | None:
        """Returns the next task; None when there will be none."""
        if not self._tasks.recv_into(self._inbox):
            return None
        message = pickle.loads(self._inbox[HEAD.size :])
        if len(message) == 2:
            offset, nbytes = message
            message = pickle.loads(bytes(np.ndarray((nbytes,), np.uint8, self._links.buffer(-1), offset)))
        return Task(*message)
