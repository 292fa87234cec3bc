"""The device lane: one executor in a thread of the training process, fed with what CPU workers have read.

It takes every task that waits, one micro-batch at a time (``device_work``), and writes finished samples into their rows
of the batch. Where they stay on a device, the next micro-batch is issued before the thread waits for the one before, so
that the device is at work while the host prepares; the stand-in on the CPU has no such two sides. What the device is
through with is reported before the next one is issued.

Where not even one sample fits into the device's memory, though the loader has no more than a batch there, the lane says
so and retires, if there is a CPU lane to go on: what it was sent goes back to the scheduler. So it does where it cannot
be opened, or breaks down; the only lane there is says that it is ``Broken`` instead. Its thread never ends by itself:
who waits for a report would wait in vain.

A function that does not return holds the lane for good: a thread cannot be ended from outside. ``Progress`` tells what
the thread is at, so that such a lane is noticed.

Of what ``Lane`` asks for it leaves out: to resize (it is one thread), to revoke (a micro-batch is not cut), to hand
over (it is here that samples are handed to), to sleep (it wakes by each task that is through).
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Sequence
from time import perf_counter

from minato_gpu.device.current_step import CurrentStep
from minato_gpu.device.executor import DeviceExecutor
from minato_gpu.device.graph_prebuild import BuildAhead
from minato_gpu.device.output import DeviceOutput
from minato_gpu.device.transfers import Transfers
from minato_gpu.device.work import BrokenDown, DeviceWork
from minato_gpu.lanes import stacks
from minato_gpu.lanes.base import Report, Task
from minato_gpu.lanes.contract import (
    Broken,
    Lane,
    Message,
    Number,
    Offers,
    Opened,
    Progress,
    Recalled,
    Retired,
)
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.notices import LOGGER, say_once
from minato_gpu.pipeline import Pipeline
from minato_gpu.scheduling.messages import DEVICE
from minato_gpu.threads import OwnThread

IN_FLIGHT = 2  # tasks of a device: one that it works on, one that is issued behind it


class DeviceLane(Lane):
    """One executor and its thread. ``threads``: DALI's threads on the CPU; ``transfers``: where batches live on a
    device, the way there; ``may_retire``: the CPU lane prepares samples too; ``name``: "device", or of several devices
    "device:n"."""

    kind = DEVICE
    slots = 1
    can_kill = False
    shows_progress = False  # a micro-batch is neither looked into nor cut
    advice = "It was not ended: a thread cannot be from outside."

    def __init__(
        self,
        links: WorkerChannels,
        pipeline: Pipeline,
        device: str,
        micro_batch: int,
        threads: int = 1,
        transfers: Transfers | None = None,
        may_retire: bool = False,
        name: str = "device",
    ) -> None:
        self.name = name
        self._device = device
        self._cuts = pipeline.cuts
        self._takes_parts = bool(pipeline.cuts) and may_retire  # another lane may begin with samples
        at = CurrentStep()
        self._executors = {
            split: DeviceExecutor(pipeline, split, device=device, max_batch=micro_batch, threads=threads, at=at)
            for split in (pipeline.host_prefix, *pipeline.cuts)
        }
        needed = {pipeline.host_prefix, *(pipeline.cuts if self._takes_parts else ())}
        self._ahead = BuildAhead({split: self._executors[split] for split in sorted(needed)})
        self._transfers = transfers
        store = Store(-1, links)
        self._outlet = DeviceOutput(store, transfers)
        self._work = DeviceWork(
            pipeline,
            self._executors,
            at,
            store,
            self._outlet,
            depth=1 if transfers is None else IN_FLIGHT,
            counts_cores=device == "cpu",  # a GPU's time is not that of cores
            ahead=self._ahead,
            no_memory=self._retire,
            useless=self._retire_useless,
            trim=None if transfers is None else transfers.accelerator.trim,
            report=self._report,
            next_task=self._next_task,
        )
        self._peeked: deque[Task | None] = deque()  # taken from there by the thread, and not begun
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._told: deque[Message] = deque()
        self._looks = False  # somebody wants to know what the thread is at
        self._offered = Offers(frozenset())
        self._begun: dict[tuple[int, int], Task] = {}  # by run and chunk, those that are not reported
        self._arrived = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._hung = False
        self._may_retire = may_retire
        self.retired = False
        self._loaded_before = "nvidia.dali.fn" in sys.modules
        self._built = threading.Event()  # or never to be
        self._thread: OwnThread | None = OwnThread(target=self._main, name=f"minato-{name}", daemon=True)
        self._thread.start()

    def await_graphs(self) -> None:
        """Wait until graphs are built, for a second at most, where DALI has been imported before. It holds the
        interpreter lock while it builds, so nobody loses by that, and no batch is delivered between two graphs. Where
        it has to be imported first, that takes half a second, in which the CPU lane has batches to give: those are
        worth more than that the training loop does not stop once, for as long as the graphs take."""
        if self._loaded_before:
            self._built.wait(1.0)

    def send(self, task: Task, worker: int = 0) -> None:
        """See Lane."""
        self._tasks.put(task)

    def recall(self) -> None:
        """See Lane."""
        out = []
        try:
            while (task := self._tasks.get_nowait()) is not None:
                out.append((task.run, task.chunk))
        except queue.Empty:
            pass
        if out:
            self._tell(Recalled(tuple(out)))

    def look(self) -> None:
        """See Lane."""
        self._looks = True

    def receive(self, only: Sequence[Number] = ()) -> Sequence[Message]:
        """See Lane. What is finished is told without being asked for."""
        if self._thread is None:
            return []
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._arrived)
        if self._takes_parts:
            self._tell_offers()
        told = [self._told.popleft() for _ in range(len(self._told))]
        if self._looks:
            self._looks = False
            told.append(Progress(self._work.at_work()))
        return told

    def _tell_offers(self) -> None:
        offers = Offers(frozenset(split for split in self._cuts if self.offers(split)))
        if offers != self._offered:
            self._offered = offers
            self._told.append(offers)

    def fds(self) -> list[int]:
        """See Lane."""
        return [self._arrived]

    def who(self, worker: int) -> str:
        """See Lane."""
        return f"{self.name} lane (a thread of the training process)"

    def stack_of_hung(self, worker: int) -> str:
        """See Lane."""
        self._hung = True
        return self._stack()

    def stacks_at_work(self) -> str:
        """See Lane."""
        return f"\n{self.who(0)} is at work.{self._stack()}" if self._work.at_work() else ""

    def _stack(self) -> str:
        thread = self._thread
        return "" if thread is None else f"\nIts thread is at:\n{stacks.of_thread(thread)}"

    def close(self, timeout: float) -> bool:
        """Wait for the micro-batches under way, then let go of graphs and memory; idempotent.

        False where it has been seen to hang and still does after ``timeout``: then all of that stays.
        """
        if self._thread is None:
            return True
        self.recall()
        self._work.closing = True
        self._tasks.put(None)
        self._thread.join(timeout if self._hung else None)
        if self._thread.is_alive():
            warnings.warn(
                f"the {self.name} lane still hangs {timeout} s after its loader was closed; a thread cannot be ended "
                "from outside, so it and its memory stay.",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
        self._thread = None
        self._told.clear()  # who has a loader that has ended keeps no device memory
        self._begun.clear()
        for executor in self._executors.values():
            executor.close()
        os.close(self._arrived)
        return True

    # --- the thread ----------------------------------------------------------------------------------------

    def _main(self) -> None:
        work, closing = self._work, False
        try:
            self._open()
        except BaseException as error:
            self._break_down(error)
        self._built.set()
        while work.under_way or not closing:
            try:
                closing = self._go_on() or closing
            except BaseException as error:
                self._break_down(error)
        work.close()

    def _open(self) -> None:
        """Import what stages need, and build graphs. Without that the CPU's implementations prepare the samples, in the
        lane there is."""
        if self._transfers is not None:
            self._transfers.accelerator.enter()
        try:
            for executor in self._executors.values():
                executor.load()
            self._ahead.open()
            self._built.set()
        except ImportError as error:
            how = "pip install 'minato-gpu[cuda13]' (or cuda12)"
            say_once(f"the pipeline runs on the CPU alone: the device lane needs {error.name}; {how}")
            if self._may_retire:
                self._give_up()
                return
        except Exception as error:
            self._end_for(error, "cannot be opened")
            return
        self._tell(Opened(self.slots))

    def _go_on(self) -> bool:
        """Begin the next task, or end the one that has been under way for longest; whether no other will come."""
        try:
            task = self._peeked.popleft() if self._peeked else self._tasks.get(block=not self._work.under_way)
        except queue.Empty:
            self._work.end()
            return False
        if task is not None and self.retired:
            self._report(_refused(task))
        elif task is not None:
            self._begun[task.run, task.chunk] = task
            self._work.begin(task)
        return task is None

    def _next_task(self) -> Task | None:
        """The task that comes after the one that is at work, if there is one and it was not asked for before."""
        if self._peeked:
            return None
        try:
            self._peeked.append(self._tasks.get_nowait())
        except queue.Empty:
            return None
        task = self._peeked[-1]
        if task is not None:
            self._begun[task.run, task.chunk] = task
        return task

    def _report(self, report: Report) -> None:
        self._begun.pop((report.run, report.chunk), None)
        self._tell(report)

    def _break_down(self, error: BaseException) -> None:
        """Something that is nobody's fault but the lane's own: others do what it has begun."""
        traceback.clear_frames(error.__traceback__)  # they hold samples
        if isinstance(error, BrokenDown):
            error = error.why
            traceback.clear_frames(error.__traceback__)
        self._work.abandon()
        self._peeked = deque(task for task in self._peeked if task is None)
        self._end_for(error, "has broken down")
        for task in list(self._begun.values()) if self._may_retire else ():
            self._report(_refused(task))

    def _end_for(self, error: BaseException, what: str) -> None:
        """Others do what is left, and what is still sent; where there are none, whoever waits is told."""
        if self._may_retire:
            LOGGER.warning("the %s lane %s; %s (%r)", self.name, what, self._others(), error)
            self._give_up()
        else:
            self.retired = True
            self._tell(Broken(error))

    def _give_up(self) -> None:
        if not self.retired:
            self.retired = True
            self._tell(Retired())

    def _tell(self, message: Message) -> None:
        self._told.append(message)
        os.eventfd_write(self._arrived, 1)

    def offers(self, split: int) -> bool:
        """Whether samples that come cut at ``split`` find everything built."""
        return self._executors[split].built and not self.retired

    def _retire(self, error: Exception) -> None:
        """The device has no memory for even one sample. Where batches and samples that came before fill it, less of
        them is to be there, and the lane goes on."""
        room = self._outlet.room
        if self._transfers is not None and room is not None and self._transfers.make_way(room.held):
            for executor in self._executors.values():
                executor.batches.size.set(executor.batches.size.most)
            return
        if self._may_retire and not self.retired:
            self._give_up()
            what = f"the {self.name.replace(':', ' number ')} has no memory left to prepare samples"
            LOGGER.warning("%s; %s (%s)", what, self._others(), error)

    def _retire_useless(self, why: str) -> None:
        """The device has failed every sample for long, and the CPU could prepare them all. The only lane stays: its
        thread prepares them, which is slow and right."""
        if self.retired:
            return
        alone = "without a CPU lane, this one prepares all samples on one core: leave lanes out"
        what = f"the {self.name} lane fails every sample that it is given, and the CPU prepares them"
        LOGGER.warning("%s; %s (%s)", what, self._others() if self._may_retire else alone, why)
        if self._may_retire:
            self._give_up()

    def _others(self) -> str:
        """Who goes on."""
        alone = self.name == "device"
        return "the CPU lane goes on alone" if alone else "the CPU lane and other devices go on without it"

    def stats(self) -> dict[str, bool | int | float]:
        """See Lane."""
        executors = self._executors.values()
        return {
            "micro_batch": min(executor.batches.size.limit for executor in executors),
            "short_of_memory": sum(executor.batches.short for executor in executors),
            "spilled_to_host": self._outlet.spilled,
            "retired": self.retired,
        }


def _refused(task: Task) -> Report:
    """Nothing of the task has been done, nor will be."""
    now = perf_counter()
    return Report(task.run, task.chunk, worker=0, first=0, done=0, seconds=0.0, begin=now, end=now, final=True)
