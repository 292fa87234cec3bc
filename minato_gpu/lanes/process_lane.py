"""The CPU lane of worker processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import select
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.multiprocessing

from minato_gpu.lanes import stacks
from minato_gpu.lanes.base import Report, Task
from minato_gpu.lanes.contract import Arrived, Exit, Recalled
from minato_gpu.lanes.processes import Workers
from minato_gpu.lanes.produce import Job
from minato_gpu.lanes.spawner import Context
from minato_gpu.lanes.wire import BUFFER, HEAD, LARGE
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.lanes.worker_lane import WorkerLane
from minato_gpu.memory import blobs
from minato_gpu.memory.status_board import RING_FROM


def start_method(context: Context | None) -> tuple[Any, str | None]:
    """The context of ``multiprocessing`` that a loader's argument stands for, and the name of its start method."""
    context = context or torch.multiprocessing
    method = context.get_start_method() if hasattr(context, "get_start_method") else None
    return multiprocessing.get_context(method) if context is torch.multiprocessing else context, method


class ProcessLane(WorkerLane):
    """Worker processes. ``replaceable``: those that die can be replaced."""

    can_kill = True

    def __init__(self, links: WorkerChannels, job: Job, context: Context, *, replaceable: bool = False) -> None:
        super().__init__(links)
        context, method = start_method(context)
        self._waiting: dict[int, deque[bytes]] = {n: deque() for n in range(len(links.task_senders))}
        self._large: dict[tuple[int, int], int] = {}
        self._pool: Workers | None = Workers(
            context, links, job, links.workers, forks=method == "fork", replaceable=replaceable
        )
        self._watch = select.epoll()  # one question tells what there is to be read
        self._reports = links.report_receiver.fileno()
        for fd in (*self.fds(), *self.fault_fds(), self._reports):
            self._watch.register(fd, select.EPOLLIN)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers by number."""
        return [] if self._pool is None else self._pool.pids

    def send(self, task: Task, worker: int = 0) -> None:
        """See Lane."""
        self.leases.add(task)
        head, data = HEAD.pack(task.run, task.chunk), pickle.dumps(tuple(task), 5)
        if len(data) > LARGE:
            arena = self.links.engine_arena
            offset = arena.allocate(len(data))
            arena.buffer[offset : offset + len(data)] = data
            self._large[task.run, task.chunk] = offset
            data = pickle.dumps((offset, len(data)))
        queue = self._waiting[worker % len(self._waiting)]
        queue.append(head + data)
        self._flush(worker % len(self._waiting))

    def recall(self) -> None:
        """See Lane."""
        self.links.board.words[RING_FROM] = 0
        recalled: list[bytes] = []
        for number, receiver in enumerate(self.links.task_receivers):
            recalled += self._waiting[number]
            self._waiting[number].clear()
            try:
                while True:
                    recalled.append(receiver.recv(BUFFER, socket.MSG_DONTWAIT))
            except BlockingIOError:
                pass
        out = []
        for data in recalled:
            run, chunk = HEAD.unpack_from(data)
            self._free_large(run, chunk)
            self.leases.drop(run, chunk)
            out.append((run, chunk))
        if out:
            self._answer(Recalled(tuple(out)))

    def _free_large(self, run: int, chunk: int) -> None:
        offset = self._large.pop((run, chunk), None)
        if offset is not None:
            self.links.engine_arena.free(offset)

    def _flush(self, number: int) -> None:
        queue, sender = self._waiting[number], self.links.task_senders[number]
        while queue:
            try:
                sender.send(queue[0])
            except BlockingIOError:
                return
            queue.popleft()

    def _messages(self) -> list[Report]:
        if self._pool is None:
            return []
        told = False
        for fd, _ in self._watch.poll(0, 4):
            if fd == self.links.consumer_wake:
                os.eventfd_read(fd)
            elif fd == self._reports:
                told = True
            else:
                self._faults += self._pool.news()
        for number in self._waiting:
            if self._waiting[number]:
                self._flush(number)
        return self._read() if told or self._faults else []

    def _read(self) -> list[Report]:
        reports: list[Report] = []
        receiver = self.links.report_receiver
        while True:
            try:
                data = receiver.recv(BUFFER)
            except BlockingIOError:
                return reports
            message = pickle.loads(data)
            if len(message) == 3:
                worker, offset, nbytes = message
                message = blobs.load(np.ndarray((nbytes,), np.uint8, self.links.buffer(worker), offset).copy())
                self.leases.give_back(worker, offset)
            reports.append(Report(*message))

    def _reported(self, reports: Sequence[Report]) -> None:
        for report in reports if self._large else ():
            if report.final:
                self._free_large(report.run, report.chunk)

    def _buried(self, fault: Exit | Arrived) -> Exit | Arrived:
        fault = super()._buried(fault)
        if isinstance(fault, Exit) and not fault.unborn:
            self._free_large(fault.claim.run, fault.claim.chunk)
        return fault

    def stuck(self) -> str:
        """See Lane."""
        pids, readers = self.pids, self.links.stack_readers
        return stacks.told({number: stacks.of_process(pids[number], readers[number]) for number in self._suspects()})

    def stuck_at(self, worker: int) -> str:
        """See Lane."""
        return stacks.told({worker: stacks.of_process(self.pids[worker], self.links.stack_readers[worker])})

    def kill(self, worker: int, stuck: str) -> None:
        """See Lane."""
        if self._pool is not None:
            self._gone.add(worker)  # which takes some time on a busy machine: it has not hung once more
            self._pool.kill(worker, stuck)

    def replace(self, worker: int, blocks: Sequence[tuple[int, int]]) -> None:
        """See Lane."""
        self.links.arenas[worker].forsake(blocks)
        self.links.board.forget(worker)
        self._gone.discard(worker)
        if self._pool is not None:
            self._pool.replace(worker, blocks)

    def fds(self) -> list[int]:
        """See Lane."""
        return [self.links.consumer_wake]

    def fault_fds(self) -> list[int]:
        """See Lane."""
        return [] if self._pool is None else [self._pool.fd()]

    def close(self, timeout: float) -> bool:
        """Let idle workers leave, end busy ones after ``timeout`` seconds; idempotent."""
        if self._pool is None:
            return True
        self.links.activate(self.links.workers)  # those that rest are to leave, too
        for number in range(self.links.workers):
            try:
                self.links.sender(number).send(b"")
            except OSError:
                break
        self.links.close_parent_ends()
        self._pool.close(timeout)
        self._pool = None
        self._watch.close()
        return True
