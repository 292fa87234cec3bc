"""A loader with thread workers on a clock of its own, one thread at a time: the same steps in every run.

The loader's threads are real, and so is all that they run. But each of them goes on only when it is told to: a worker
"sleeps" for its sample until the clock has come to that, or waits for a task; the pump thread waits until it is woken;
and the consumer lets them, in the order of the clock, while it waits for a batch (``select.poll``) or trains
(``advance``). The code of the loader takes no time on that clock. So whoever counts what happens (``Counts``) gets the
same figures in every run, on any machine.
"""

from __future__ import annotations

import gc
import heapq
import queue
import select
import sys
import threading
from _thread import LockType, allocate_lock
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from minato_gpu.engine import engine, supervision
from minato_gpu.lanes import cpu_time, thread_lane
from minato_gpu.util.threads import await_event

CONSUMER, PUMP, WORKERS = "consumer", "pump", "workers"
_PUMP_THREAD, _WORKER_THREADS = "minato-pump", "minato-worker"


@dataclass
class Counts:
    """What happened while ``Lockstep.counting``.

    ``calls``: of Python functions, in the consumer's thread, the pump's and the workers' (of code outside the tests);
    ``wakes``: how often the first two were woken; ``tasks`` that were sent, by kind.
    """

    calls: Counter[str] = field(default_factory=Counter)
    wakes: Counter[str] = field(default_factory=Counter)
    tasks: Counter[str] = field(default_factory=Counter)


class _Thread:
    """One of the loader's, while it may not run. ``wants``: whether there is something for it to do now."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.door: LockType = allocate_lock()
        self.door.acquire()
        self.known = False
        self.wants: Any = None


class Lockstep:
    """Of one loader with ``workers`` threads; the thread that makes it is the consumer."""

    def __init__(self, workers: int, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.counts = Counts()
        self.counting = False
        self._starting = workers + 1  # threads that have not come to where they wait
        self._free = False
        self._threads: dict[int, _Thread] = {}
        self._named: dict[str, tuple[list[_Thread], int]] = {}  # by the beginning of their names; of how many threads
        self._registered: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._back: LockType = allocate_lock()
        self._back.acquire()
        self._sleepers: list[tuple[float, int, _Thread]] = []
        self._numbers = 0
        for name, module in list(sys.modules.items()):
            if name.startswith("minato_gpu") and hasattr(module, "perf_counter"):
                patch.setattr(module, "perf_counter", lambda: self.now)
        patch.setattr(engine, "select", SimpleNamespace(poll=lambda: _Poll(self), POLLIN=select.POLLIN))
        patch.setattr(supervision, "await_event", self._await)
        patch.setattr(cpu_time.RunQueueDelay, "__call__", lambda _: 0.0)
        send, lockstep = thread_lane.ThreadLane.send, self

        class Tasks(queue.SimpleQueue[Any]):
            def get(self, *how: Any) -> Any:
                return lockstep._receive(self, super().get)

        patch.setattr(thread_lane, "queue", SimpleNamespace(SimpleQueue=Tasks, Empty=queue.Empty))

        def counted(lane: thread_lane.ThreadLane, task: Any, *rest: Any) -> None:
            if self.counting:
                self.counts.tasks[task.kind] += 1
            send(lane, task, *rest)

        patch.setattr(thread_lane.ThreadLane, "send", counted)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what happens meanwhile, without the garbage collector, which would come where it likes."""
        gc.collect()
        gc.disable()
        self.counting = True
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            self.counting = False
            gc.enable()

    def release(self) -> None:
        """Let every thread run freely from now on, so that the loader can end."""
        self._free = True
        for thread in self._threads.values():
            thread.door.release()

    # --- called by the loader's threads ------------------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        """In a worker: the sample takes so long."""
        if self._free:
            return
        self._numbers += 1
        thread = self._this()
        heapq.heappush(self._sleepers, (self.now + seconds, self._numbers, thread))
        self._stop(thread, None)

    def _receive(self, tasks: Any, receive: Any) -> Any:
        while not self._free:
            self._stop(self._this(), lambda: not tasks.empty())
            if not self._free:
                try:
                    return tasks.get_nowait()
                except queue.Empty:
                    continue
        return receive()

    def _await(self, event: int) -> None:
        """In the pump thread."""
        if not self._free:
            poll = select.poll()
            poll.register(event, select.POLLIN)
            self._stop(self._this(), lambda: bool(poll.poll(0)))
        await_event(event)

    def _this(self) -> _Thread:
        ident = threading.get_ident()
        if ident not in self._threads:
            self._threads[ident] = _Thread(threading.current_thread().name)
        return self._threads[ident]

    def _stop(self, thread: _Thread, wants: Any) -> None:
        """Let the consumer go on, until it lets this thread."""
        thread.wants = wants
        if thread.known:
            self._back.release()
        else:
            thread.known = True
            self._registered.put(None)
        thread.door.acquire()
        sys.setprofile(self._profile if self.counting else None)

    # --- called by the consumer --------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """The consumer trains for so long."""
        end = self.now + seconds
        while True:
            woken = next((each for each in self._of(_PUMP_THREAD) if each.wants()), None)
            if woken is not None:
                self.counts.wakes[PUMP] += self.counting
                self._let(woken)
            elif not self._step(end):
                self.now = end
                return

    def wait(self, poll: Any, timeout_s: float) -> Any:
        """The consumer waits for a descriptor, or for so long."""
        self.counts.wakes[CONSUMER] += self.counting
        end = self.now + timeout_s
        while not (ready := poll.poll(0)):
            if not self._step(end):
                self.now = end
                break
        return ready

    def _step(self, end: float) -> bool:
        """The next thing that a worker does; False where that is after ``end``."""
        for thread in self._of(_WORKER_THREADS):
            if thread.wants is not None and thread.wants():
                self._let(thread)
                return True
        if not self._sleepers or self._sleepers[0][0] > end:
            return False
        self.now, _, thread = heapq.heappop(self._sleepers)
        self._let(thread)
        return True

    def _of(self, name: str) -> list[_Thread]:
        """Those threads, in the order of their names; all have come to where they wait."""
        while self._starting:
            self._registered.get(timeout=60)
            self._starting -= 1
        found, of = self._named.get(name, ([], 0))
        if of != len(self._threads):
            threads = (each for each in self._threads.values() if each.name.startswith(name))
            found = sorted(threads, key=attrgetter("name"))
            self._named[name] = found, len(self._threads)
        return found

    def _let(self, thread: _Thread) -> None:
        """Let it run until it waits again."""
        thread.door.release()
        assert self._back.acquire(timeout=60), f"{thread.name} does not come back"

    # --- counting ----------------------------------------------------------------------------------------------------

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or "/tests/" in frame.f_code.co_filename:
            return
        thread = self._threads.get(threading.get_ident())
        if thread is None:
            self.counts.calls[CONSUMER] += 1
        else:
            self.counts.calls[PUMP if thread.name == _PUMP_THREAD else WORKERS] += 1


class _Poll:
    """What the engine waits with."""

    def __init__(self, lockstep: Lockstep) -> None:
        self._lockstep = lockstep
        self._poll = select.poll()
        self.register = self._poll.register
        self.unregister = self._poll.unregister

    def poll(self, timeout_ms: float) -> Any:
        if self._lockstep._free:
            return self._poll.poll(timeout_ms)
        return self._lockstep.wait(self._poll, timeout_ms / 1e3)
