"""The CPU lane of worker threads."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter

from minato_gpu.lanes import stacks
from minato_gpu.lanes.base import Task
from minato_gpu.lanes.contract import Exit, Number
from minato_gpu.lanes.produce import Job
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.worker import Worker
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.lanes.worker_lane import WorkerLane
from minato_gpu.util.threads import OwnThread

_Queue = queue.SimpleQueue[Task | None]


class ThreadLane(WorkerLane):
    """Runs worker threads. They cannot be killed: one that is stuck in a sample stays until Python ends.

    ``enter`` is called as each thread begins, to choose a GPU: libraries take memory of the current one, which is the
    first one in a new thread.
    """

    advice = "It was not replaced: threads cannot be ended from outside. worker_kind='process' can."

    def __init__(self, links: WorkerChannels, job: Job, enter: Callable[[], None] = lambda: None) -> None:
        super().__init__(links)
        self._enter = enter
        addressed = len(links.task_senders) > 1  # tasks are for a certain worker; else any thread takes the next
        self._queues: list[_Queue] = [queue.SimpleQueue() for _ in range(links.workers if addressed else 1)]
        self._ended: deque[Exit] = deque()  # appended to by threads
        self._threads: list[threading.Thread] = []
        with contextlib.ExitStack() as undo:  # descriptors and threads may run out
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.callback(os.close, self._bell)
            self._watch.register(self._bell, select.EPOLLIN)
            undo.callback(self._dismiss, None)
            for number in range(links.workers):
                args = (number, job, self._queues[number % len(self._queues)], Store(number, links))
                thread = OwnThread(target=self._main, args=args, name=f"minato-worker-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
            undo.pop_all()

    def _main(self, number: int, job: Job, tasks: _Queue, store: Store) -> None:
        """Runs in the thread. What ends a process (``SystemExit``, a panic of compiled code) ends only this thread.

        It is reported, or the loader would wait for its samples for ever.
        """
        try:
            self._enter()
            Worker(number, job, tasks.get, store, self.links).run()
        except BaseException as error:
            ended = Exit(number, os.getpid(), None, error=type(error).__name__, raised=traceback.format_exc())
            self._ended.append(ended)
            os.eventfd_write(self._bell, 1)

    def send(self, task: Task, worker: int = 0) -> None:
        """Puts the task into the queue of ``worker``, or into the one that all threads share."""
        self.leases.add(task)
        self._queues[worker % len(self._queues)].put(task)

    def _taken_back(self) -> list[Number]:
        tasks: list[Number] = []
        for waiting in self._queues:
            with contextlib.suppress(queue.Empty):
                while (task := waiting.get_nowait()) is not None:
                    tasks.append((task.run, task.chunk))
        return tasks

    def _found(self) -> Sequence[Exit]:
        os.eventfd_read(self._bell)
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def _stacks_of(self, workers: Sequence[int]) -> dict[int, str]:
        return {worker: stacks.of_thread(self._threads[worker]) for worker in workers}

    def fault_fds(self) -> list[int]:
        """Returns the descriptor that is readable when a thread has ended with an error."""
        return [self._bell]

    def close(self, timeout: float) -> bool:
        """Stops every worker after its current sample.

        Idempotent. Returns False if one is still busy after ``timeout`` seconds.
        """
        self._dismiss(timeout)
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

    def _dismiss(self, timeout: float | None) -> None:
        """Has every worker leave after its current sample.

        Those still busy after ``timeout`` seconds (None: waits for all) remain in ``_threads``.
        """
        self._begin_no_more()
        for number in range(self.links.workers):
            self._queues[number % len(self._queues)].put(None)
        end = None if timeout is None else perf_counter() + timeout
        for thread in self._threads:
            thread.join(None if end is None else max(0.0, end - perf_counter()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
