"""The CPU lane: worker processes or threads that pull chunks from one queue."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue
import socket
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch.multiprocessing

from minato_gpu.lanes import stacks
from minato_gpu.lanes.base import Report, Task
from minato_gpu.lanes.leases import Leases
from minato_gpu.lanes.links import Links
from minato_gpu.lanes.processes import Exit, Workers
from minato_gpu.lanes.produce import Job
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.wire import BUFFER, HEAD, LARGE, QueueChannel
from minato_gpu.lanes.worker import Worker
from minato_gpu.memory import blobs
from minato_gpu.memory.board import CHUNK, LIMIT, RING_FROM, RUN, SINCE_NS, STAGE, STARTED, Claim
from minato_gpu.threads import OwnThread


class _CpuLane:
    """What process and thread workers share: the board."""

    name = "cpu"
    ready = True
    away = 0  # workers that have ended and whose replacements have not started
    can_kill = False
    together = 1  # samples that a worker is at, at once
    advice = "It was not replaced: on_worker_death is 'raise', or the data set is iterable."

    def __init__(self, links: Links) -> None:
        self.links = links
        self.slots = links.workers
        self.leases = Leases(links)

    def receive(self, *, unfinished: bool = False) -> list[Report]:
        """What has been told since the last call, in reports; never blocks. ``unfinished``: also by the marks of leases
        that have not ended."""
        return self.leases.reports(self._messages(), unfinished=unfinished)

    def sleep(self) -> None:
        """The training process is about to wait: from which lease on it wants to know of their ends."""
        self.links.board.words[RING_FROM] = self.leases.low(self.slots)

    def report(self, run: int, chunk: int) -> Report | None:
        """The same of one lease, without what messages tell; None where there is nothing to tell."""
        return self.leases.report(run, chunk)

    def _messages(self) -> list[Report]:
        raise NotImplementedError

    def running(self, run: int, chunk: int) -> tuple[int, float] | None:
        """How many samples of the chunk are through, told or not, and for how long the current one has run; None when
        nobody is at it."""
        worker = self.links.board.find(run, chunk)
        if worker is None:
            return None
        row, words = self.links.board.row(worker), self.links.board.words
        return max(0, words[row + STARTED] - 1), perf_counter() - words[row + SINCE_NS] / 1e9

    def hand_over(self, run: int, chunk: int, splits: Sequence[int]) -> None:
        """Let the sample of the chunk that runs be handed over at the next of ``splits`` that it comes to."""
        self.links.board.hand_over(run, chunk, splits)

    @property
    def pids(self) -> list[int]:
        """The process of each worker."""
        return [os.getpid()] * self.links.workers

    def who(self, worker: int) -> str:
        """A worker, in words."""
        return f"worker {worker} (pid {self.pids[worker]})"

    def at_work(self) -> dict[int, tuple[float, Claim]]:
        """By worker that is at a chunk: since when it has been at the current sample, and which that is."""
        found = {}
        for worker in range(self.links.workers):
            row, words = self.links.board.row(worker), self.links.board.words
            claim = Claim(words[row + RUN], words[row + CHUNK], words[row + STARTED], words[row + STAGE])
            if claim.chunk >= 0:
                found[worker] = (words[row + SINCE_NS] / 1e9, claim)
        return found

    def _suspects(self) -> list[int]:
        """The workers that are at a chunk; all of them where none is (they may never have come to take one)."""
        words, row = self.links.board.words, self.links.board.row
        busy = [number for number in range(self.links.workers) if words[row(number) + CHUNK] >= 0]
        return busy or list(range(self.links.workers))

    def revoke(self, run: int, chunk: int, keep: int) -> int | None:
        """Start no sample of the chunk from ``keep`` on; returns where it really stops, or None if too late."""
        worker = self.links.board.find(run, chunk)
        kept = None if worker is None else self.links.board.revoke(worker, chunk, keep)
        if kept is not None:
            self.leases.revoked(run, chunk, kept)
        return kept


class ProcessLane(_CpuLane):
    """Worker processes. ``replaceable``: those that die can be replaced."""

    can_kill = True

    def __init__(self, links: Links, job: Job, context: Any, *, replaceable: bool = False) -> None:
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

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers by number."""
        return [] if self._pool is None else self._pool.pids

    def send(self, task: Task, worker: int = 0) -> None:
        """Queue a task for any worker, or for worker ``worker`` where tasks are addressed. Never blocks."""
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

    def recall(self) -> list[tuple[int, int]]:
        """Take back the tasks that no worker has taken yet; returns their (run, chunk)."""
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
        return out

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
        reports: list[Report] = []
        receiver = self.links.report_receiver
        while True:
            try:
                data = receiver.recv(BUFFER)
            except BlockingIOError:
                break
            message = pickle.loads(data)
            if len(message) == 3:
                worker, offset, nbytes = message
                message = blobs.load(np.ndarray((nbytes,), np.uint8, self.links.buffer(worker), offset).copy())
                self.links.board.give_back(worker, offset)
            reports.append(Report(*message))
        for number in self._waiting:
            if self._waiting[number]:
                self._flush(number)
        return reports

    def receive(self, *, unfinished: bool = False) -> list[Report]:
        """See Lane."""
        reports = super().receive(unfinished=unfinished)
        for report in reports if self._large else ():
            if report.final:
                self._free_large(report.run, report.chunk)
        return reports

    def stuck(self) -> str:
        """What the workers that are busy are at, in words: for the message of an error."""
        pids, readers = self.pids, self.links.stack_readers
        return stacks.told({number: stacks.of_process(pids[number], readers[number]) for number in self._suspects()})

    def stuck_at(self, worker: int) -> str:
        """What one worker is at."""
        return stacks.told({worker: stacks.of_process(self.pids[worker], self.links.stack_readers[worker])})

    def kill(self, worker: int, stuck: str) -> None:
        """End a worker that has hung; ``stuck`` says what it was at, and comes back with its ``Exit``."""
        if self._pool is not None:
            self._stuck[worker] = stuck
            self._pool.kill(worker)

    def exits(self) -> list[Exit]:
        """Workers that ended since the last call."""
        found = [] if self._pool is None else self._pool.exits()
        for exit_ in found:
            exit_.stuck = self._stuck.pop(exit_.number, "")
            exit_.error, exit_.raised = stacks.last_words(self.links.stack_readers[exit_.number])
        return found

    def bury(self, worker: int) -> Claim:
        """What a worker had taken last; it has ended, and all its reports have been received."""
        claim = self.links.board.claim(worker)
        self._free_large(claim.run, claim.chunk)
        self.leases.drop(claim.run, claim.chunk)
        self.leases.bury(worker)
        return claim

    def replace(self, worker: int, blocks: Sequence[tuple[int, int]]) -> None:
        """Start another worker in its place; ``blocks`` (offset, bytes) of what it laid down are still in use."""
        self.links.arenas[worker].forsake(blocks)
        self.links.board.forget(worker)
        if self._pool is not None:
            self.away += 1
            self._pool.replace(worker, blocks)

    def arrivals(self) -> tuple[int, list[Exit]]:
        """How many replacements have started since the last call, and those that could not be."""
        count, failed = (0, []) if self._pool is None else self._pool.arrivals()
        self.away -= count
        return count, failed

    def fds(self) -> list[int]:
        """Readable when there is something to receive; when a worker has ended, or a replacement has started."""
        exits = [] if self._pool is None else self._pool.fds()
        return [self.links.consumer_wake, *exits]

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
        return True


class ThreadLane(_CpuLane):
    """Worker threads. They cannot be killed: one that is stuck in a sample stays until Python ends."""

    advice = "It was not replaced: threads cannot be ended from outside. worker_kind='process' can."

    def __init__(self, links: Links, job: Job) -> None:
        super().__init__(links)
        addressed = len(links.task_senders) > 1
        self._channels = [QueueChannel(links) for _ in range(links.workers if addressed else 1)]
        self._ended: deque[Exit] = deque()  # appended to by threads
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
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
            Worker(number, job, channel, store, self.links).run()
        except BaseException as error:
            ended = Exit(number, os.getpid(), None, error=type(error).__name__, raised=traceback.format_exc())
            self._ended.append(ended)
            os.eventfd_write(self._bell, 1)

    def send(self, task: Task, worker: int = 0) -> None:
        """Queue a task for any worker, or for worker ``worker`` where tasks are addressed. Never blocks."""
        self.leases.add(task)
        self._channels[worker % len(self._channels)].tasks.put(task)

    def recall(self) -> list[tuple[int, int]]:
        """Take back the tasks that no worker has taken yet; returns their (run, chunk)."""
        self.links.board.words[RING_FROM] = 0
        out = []
        for channel in self._channels:
            try:
                while (task := channel.tasks.get_nowait()) is not None:
                    self.leases.drop(task.run, task.chunk)
                    out.append((task.run, task.chunk))
            except queue.Empty:
                pass
        return out

    def _messages(self) -> list[Report]:
        reports: list[Report] = []
        for channel in self._channels:
            while channel.reports:
                reports.append(channel.reports.popleft())
        return reports

    def stuck(self) -> str:
        """What the workers that are busy are at, in words: for the message of an error."""
        return stacks.told({number: stacks.of_thread(self._threads[number]) for number in self._suspects()})

    def stuck_at(self, worker: int) -> str:
        """What one worker is at."""
        return stacks.told({worker: stacks.of_thread(self._threads[worker])})

    def exits(self) -> list[Exit]:
        """Threads that something ended which is no error of a sample, since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def fds(self) -> list[int]:
        """Readable when there is something to receive; when a thread has ended."""
        return [self.links.consumer_wake, self._bell]

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
