"""The CPU lane of worker processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import select
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch.multiprocessing

from minato_gpu.lanes.base import Task
from minato_gpu.lanes.contract import Exit, Message, Number, Opened
from minato_gpu.lanes.processes import Workers
from minato_gpu.lanes.produce import Job
from minato_gpu.lanes.spawner import Context
from minato_gpu.lanes.worker_channels import HEAD, LARGE, WorkerChannels
from minato_gpu.lanes.worker_lane import WorkerLane
from minato_gpu.memory.status_board import INBOX


def start_method(context: Context | None) -> tuple[Any, str | None]:
    """Returns the context of ``multiprocessing`` that a loader's argument stands for (None: the program's default), and
    the name of its start method; None if the context does not tell that."""
    context = context or torch.multiprocessing
    method = context.get_start_method() if hasattr(context, "get_start_method") else None
    return multiprocessing.get_context(method) if context is torch.multiprocessing else context, method


class ProcessLane(WorkerLane):
    """Worker processes. ``replaceable``: those that die can be replaced."""

    can_kill = has_arenas = True

    def __init__(self, links: WorkerChannels, job: Job, context: Context, *, replaceable: bool = False) -> None:
        super().__init__(links)
        context, method = start_method(context)
        self._waiting = [deque[bytes]() for _ in links.task_senders]
        self._large: dict[Number, int] = {}  # where tasks are stored that are too large for a message
        pool = Workers(context, links, job, links.workers, forks=method == "fork", replaceable=replaceable)
        self._pool: Workers | None = pool
        self.pids = pool.pids
        self._watch.register(pool.fd(), select.EPOLLIN)

    def send(self, task: Task, worker: int = 0) -> None:
        """Puts the task where a worker finds it."""
        self.leases.add(task)
        head, data = HEAD.pack(task.run, task.chunk), pickle.dumps(tuple(task), 5)
        if len(data) > LARGE:
            arena = self.links.engine_arena
            offset = arena.allocate(len(data))
            arena.buffer[offset : offset + len(data)] = data
            self._large[task.run, task.chunk] = offset
            data = pickle.dumps((offset, len(data)))
        number = worker % len(self._waiting)
        self._waiting[number].append(head + data)
        self._flush(number)

    def _taken_back(self) -> list[Number]:
        taken: list[bytes] = []
        for number, receiver in enumerate(self.links.task_receivers):
            taken += self._waiting[number]
            self._waiting[number].clear()
            with contextlib.suppress(BlockingIOError):
                while data := receiver.recv(INBOX, socket.MSG_DONTWAIT):  # nothing: closed before
                    taken.append(data)
        return [HEAD.unpack_from(data) for data in taken]

    def _flush(self, number: int) -> None:
        queue, sender = self._waiting[number], self.links.task_senders[number]
        while queue:
            try:
                sender.send(queue[0])
            except BlockingIOError:
                return
            queue.popleft()

    def receive(self, only: Sequence[Number] = ()) -> Sequence[Message]:
        """Returns what has been reported; frees the memory of large tasks that have ended."""
        messages = super().receive(only)
        for number, waiting in enumerate(self._waiting):
            if waiting:
                self._flush(number)
        for task in [each for each in self._large if each not in self.leases] if self._large else ():
            self.links.engine_arena.free(self._large.pop(task))
        return messages

    def _found(self) -> Sequence[Exit | Opened]:
        return [] if self._pool is None else self._pool.news()

    def _stacks_of(self, workers: Sequence[int]) -> dict[int, str]:
        found = self.links.stacks.of_processes([self.pids[worker] for worker in workers])
        return {worker: found[self.pids[worker]] for worker in workers}

    def kill(self, worker: int, hung: str) -> None:
        """Kills a worker process that has hung."""
        if self._pool is not None:
            self._gone.add(worker)  # which takes some time on a busy machine: it has not hung once more
            self._pool.kill(worker, hung)

    def replace(self, worker: int, blocks: Sequence[tuple[int, int]]) -> None:
        """Starts another worker process."""
        self.links.arenas[worker].forsake(blocks)
        self.links.board.forget(worker)
        self._gone.discard(worker)
        if self._pool is not None:
            self._pool.replace(worker, blocks)

    def fault_fds(self) -> list[int]:
        """Returns the descriptor that is readable when a process has ended, or a replacement has started."""
        return [] if self._pool is None else [self._pool.fd()]

    def close(self, timeout: float) -> bool:
        """Lets idle workers leave, and ends busy ones after ``timeout`` seconds. Idempotent."""
        if self._pool is None:
            return True
        self._begin_no_more()
        senders = self.links.task_senders
        for number in range(self.links.workers):
            try:
                senders[number % len(senders)].send(b"")
            except OSError:
                break
        self.links.close_parent_ends()
        self._pool.close(timeout)
        self._pool = None
        self._watch.close()
        return True
