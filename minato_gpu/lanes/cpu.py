"""The CPU lane: worker processes or threads that pull chunks from one queue."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle
import queue
import select
import socket
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch.multiprocessing

from minato_gpu.lanes import stacks
from minato_gpu.lanes.base import Report, Task
from minato_gpu.lanes.contract import (
    Arrived,
    AtWork,
    Exit,
    Message,
    Number,
    Opened,
    Progress,
    Recalled,
    Revoked,
)
from minato_gpu.lanes.leases import Leases
from minato_gpu.lanes.processes import Workers
from minato_gpu.lanes.produce import Job
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.wire import BUFFER, HEAD, LARGE, QueueChannel
from minato_gpu.lanes.worker import Worker
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory import blobs
from minato_gpu.memory.status_board import CHUNK, LIMIT, RING_FROM, RUN, SINCE_NS, STAGE, STARTED, Claim
from minato_gpu.scheduling.messages import CPU
from minato_gpu.threads import OwnThread


class _CpuLane:
    """What process and thread workers share: the board."""

    name = kind = CPU
    can_kill = False
    shows_progress = True
    advice = "It was not replaced: on_worker_death is 'raise', or the data set is iterable."

    def __init__(self, links: WorkerChannels) -> None:
        self.links = links
        self.slots = links.workers
        self.leases = Leases(links)
        self._answers: list[Message] = [Opened(self.slots)]
        self._faults: list[Exit | Arrived] = []
        self._looks = False  # somebody wants to know how far it all is
        self._gone: set[int] = set()  # workers that have ended

    def sleep(self, *, every_task: bool) -> None:
        """See Lane."""
        self.links.board.words[RING_FROM] = 0 if every_task else self.leases.low(self.slots)

    # --- work ---

    def revoke(self, run: int, chunk: int, keep: int) -> None:
        """See Lane."""
        worker = self.links.board.find(run, chunk)
        kept = None if worker is None else self.links.board.revoke(worker, chunk, keep)
        if kept is not None:
            self.leases.revoked(run, chunk, kept)
            self._answer(Revoked(run, chunk, kept))

    def hand_over(self, run: int, chunk: int, splits: Sequence[int]) -> None:
        """See Lane."""
        self.links.board.hand_over(run, chunk, splits)

    def look(self) -> None:
        """See Lane."""
        self._looks = True

    def _answer(self, message: Message) -> None:
        self._answers.append(message)
        os.eventfd_write(self.links.consumer_wake, 1)

    # --- what it tells ---

    def receive(self, only: Sequence[Number] = ()) -> Sequence[Message]:
        """See Lane."""
        if only:
            told = [report for each in only if (report := self.leases.report(*each)) is not None]
            self._reported(told)
            return told
        messages = self._messages()  # and of the dead: all that they told is there by then
        reports = self.leases.reports(messages, unfinished=self._looks or bool(self._faults))
        self._reported(reports)
        if not (self._answers or self._faults or self._looks):
            return reports
        out: list[Message] = [*self._answers, *reports]
        if self._looks:
            out.append(Progress(self.at_work()))
        out += map(self._buried, self._faults)
        self._answers, self._faults, self._looks = [], [], False
        return out

    def _messages(self) -> list[Report]:
        """What has come by messages; before that, workers that have ended or arrived go to ``_faults``."""
        raise NotImplementedError

    def _reported(self, reports: Sequence[Report]) -> None:
        """These are told."""

    def _buried(self, fault: Exit | Arrived) -> Exit | Arrived:
        """The same, with what the worker had taken last; all that it told is taken in."""
        if isinstance(fault, Arrived) or fault.unborn:
            return fault
        claim = self.links.board.claim(fault.number)
        self.leases.drop(claim.run, claim.chunk)
        self.leases.bury(fault.number)
        self._gone.add(fault.number)
        return dataclasses.replace(fault, claim=claim)

    def at_work(self) -> tuple[AtWork, ...]:
        """What the workers are at that are at a task."""
        found, board, words = [], self.links.board, self.links.board.words
        for worker in range(self.links.workers):
            row = board.row(worker)
            if words[row + CHUNK] >= 0 and worker not in self._gone:
                claim = Claim(words[row + RUN], words[row + CHUNK], words[row + STARTED], words[row + STAGE])
                found.append(AtWork(worker, claim, words[row + SINCE_NS] / 1e9))
        return tuple(found)

    # --- faults ---

    def replace(self, worker: int, blocks: Sequence[tuple[int, int]]) -> None:
        """Nobody is."""

    def kill(self, worker: int, stuck: str) -> None:
        """Nobody can be."""

    @property
    def pids(self) -> list[int]:
        """The process of each worker."""
        return [os.getpid()] * self.links.workers

    def who(self, worker: int) -> str:
        """See Lane."""
        return f"worker {worker} (pid {self.pids[worker]})"

    def stats(self) -> dict[str, bool | int | float]:
        """None of its own."""
        return {}

    def _suspects(self) -> list[int]:
        """The workers that are at a chunk; all of them where none is (they may never have come to take one)."""
        busy = [each.worker for each in self.at_work()]
        return busy or list(range(self.links.workers))


class ProcessLane(_CpuLane):
    """Worker processes. ``replaceable``: those that die can be replaced."""

    can_kill = True

    def __init__(self, links: WorkerChannels, job: Job, context: Any, *, replaceable: bool = False) -> None:
        super().__init__(links)
        context = context or torch.multiprocessing
        method = context.get_start_method() if hasattr(context, "get_start_method") else None
        if context is torch.multiprocessing:
            context = multiprocessing.get_context(method)
        self._waiting: dict[int, deque[bytes]] = {n: deque() for n in range(len(links.task_senders))}
        self._large: dict[tuple[int, int], int] = {}
        self._stuck: dict[int, str] = {}  # by worker that is being killed: what it was at
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
                self._look_for_faults(self._pool)
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

    def _look_for_faults(self, pool: Workers) -> None:
        for each in pool.exits():
            stuck = self._stuck.pop(each.number, "")
            error, raised = stacks.last_words(self.links.stack_readers[each.number])
            self._faults.append(dataclasses.replace(each, stuck=stuck, error=error, raised=raised))
        arrived, unborn = pool.arrivals()
        self._gone.difference_update(arrived)
        self._faults += [*([Arrived(len(arrived))] if arrived else ()), *unborn]

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
            self._stuck[worker] = stuck
            self._pool.kill(worker)

    def replace(self, worker: int, blocks: Sequence[tuple[int, int]]) -> None:
        """See Lane."""
        self.links.arenas[worker].forsake(blocks)
        self.links.board.forget(worker)
        if self._pool is not None:
            self._pool.replace(worker, blocks)

    def fds(self) -> list[int]:
        """See Lane."""
        return [self.links.consumer_wake]

    def fault_fds(self) -> list[int]:
        """See Lane."""
        return [] if self._pool is None else self._pool.fds()

    def close(self, timeout: float) -> bool:
        """Let idle workers leave, end busy ones after ``timeout`` seconds; idempotent."""
        if self._pool is None:
            return True
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


class ThreadLane(_CpuLane):
    """Worker threads. They cannot be killed: one that is stuck in a sample stays until Python ends.

    ``enter``: what each begins with: to choose a GPU, as libraries that look for theirs take memory of the current one,
    which is the first one in a new thread.
    """

    advice = "It was not replaced: threads cannot be ended from outside. worker_kind='process' can."

    def __init__(self, links: WorkerChannels, job: Job, enter: Callable[[], None] = lambda: None) -> None:
        super().__init__(links)
        self._enter = enter
        addressed = len(links.task_senders) > 1
        self._channels = [QueueChannel(links) for _ in range(links.workers if addressed else 1)]
        self._ended: deque[Exit] = deque()  # appended to by threads
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._watch = select.epoll()
        for fd in (*self.fds(), *self.fault_fds()):
            self._watch.register(fd, select.EPOLLIN)
        self._threads: list[threading.Thread] = []
        for number in range(links.workers):
            channel = self._channels[number % len(self._channels)]
            args = (number, job, channel, Store(number, links, None, links.board))
            thread = OwnThread(target=self._main, args=args, name=f"minato-worker-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _main(self, number: int, job: Job, channel: QueueChannel, store: Store) -> None:
        """In the thread. What ends a process (``SystemExit``, a panic of compiled code) ends no more than this one: it
        is told, or the loader would wait for its samples for ever."""
        try:
            self._enter()
            Worker(number, job, channel, store, self.links).run()
        except BaseException as error:
            ended = Exit(number, os.getpid(), None, error=type(error).__name__, raised=traceback.format_exc())
            self._ended.append(ended)
            os.eventfd_write(self._bell, 1)

    def send(self, task: Task, worker: int = 0) -> None:
        """See Lane."""
        self.leases.add(task)
        self._channels[worker % len(self._channels)].tasks.put(task)

    def recall(self) -> None:
        """See Lane."""
        self.links.board.words[RING_FROM] = 0
        out = []
        for channel in self._channels:
            try:
                while (task := channel.tasks.get_nowait()) is not None:
                    self.leases.drop(task.run, task.chunk)
                    out.append((task.run, task.chunk))
            except queue.Empty:
                pass
        if out:
            self._answer(Recalled(tuple(out)))

    def _messages(self) -> list[Report]:
        for fd, _ in self._watch.poll(0, 2) if self._bell >= 0 else ():
            os.eventfd_read(fd)
        self._faults += [self._ended.popleft() for _ in range(len(self._ended))]
        reports: list[Report] = []
        for channel in self._channels:
            while channel.reports:
                reports.append(channel.reports.popleft())
        return reports

    def stuck(self) -> str:
        """See Lane."""
        return stacks.told({number: stacks.of_thread(self._threads[number]) for number in self._suspects()})

    def stuck_at(self, worker: int) -> str:
        """See Lane."""
        return stacks.told({worker: stacks.of_thread(self._threads[worker])})

    def fds(self) -> list[int]:
        """See Lane."""
        return [self.links.consumer_wake]

    def fault_fds(self) -> list[int]:
        """See Lane."""
        return [self._bell]

    def close(self, timeout: float) -> bool:
        """Stop every worker after its current sample; idempotent. False when one is still busy after ``timeout``."""
        for number in range(self.links.workers):
            self.links.board.words[self.links.board.row(number) + LIMIT] = 0
            self._channels[number % len(self._channels)].tasks.put(None)
        end = perf_counter() + timeout
        for thread in self._threads:
            thread.join(max(0.0, end - perf_counter()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if not self._threads and self._bell >= 0:
            self._watch.close()
            os.close(self._bell)
            self._bell = -1
        if self._threads:
            warnings.warn(
                f"{len(self._threads)} worker threads are still busy with a sample {timeout} s after their loader was "
                "closed; threads cannot be ended from outside. Use worker_kind='process' for data sets that can hang.",
                RuntimeWarning,
                stacklevel=2,
            )
        return not self._threads
