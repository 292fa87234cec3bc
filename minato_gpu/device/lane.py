"""The device lane: one thread of the training process that runs device stages on samples that CPU workers have read.

``DeviceLane`` takes the tasks in its queue one micro-batch at a time (``device/work.py``), and stores finished samples
in their rows of the batch. Where batches live on a device, samples stay there, and the next micro-batch is issued
before the thread waits for the previous one, so that the device works while the host prepares. The stand-in on the CPU
has no such overlap. Finished tasks are reported before the next one is issued.

The lane retires, and the scheduler gets its tasks back, when it cannot be opened, breaks down, or is of no use
(``device/work.py``). Without a CPU lane it posts ``Broken`` where it cannot be opened or breaks down; where a library
is missing or it is of no use, it prepares samples by their CPU implementations. Its thread ends only with ``close``, so
that a reader of messages never waits in vain.

A function that never returns blocks the lane for good, since a thread cannot be ended from outside; ``Progress`` shows
its current step, so that the watchdog notices.

Optional commands of ``Lane`` that it does not implement: resize (it is one thread), revoke (a micro-batch is not cut),
hand_over (it is the lane that takes over), sleep (it signals each finished task).
"""

from __future__ import annotations

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
from minato_gpu.pipeline.pipeline import Pipeline
from minato_gpu.scheduling.messages import DEVICE
from minato_gpu.util.messages import LOGGER, say_once
from minato_gpu.util.threads import OwnThread


class DeviceLane(Lane):
    """Runs the executors of one device on a thread of its own. Its methods are for whoever holds the engine's lock,
    except those below "the thread".

    Args:
        device: of the executors: "cpu", "cuda" or "cuda:N".
        micro_batch: most samples that run at once.
        threads: DALI's threads on the CPU.
        transfers: copies to the device on which batches live; None where they live on the host.
        may_retire: whether a CPU lane prepares samples, too.
        name: "device", or "device:n" for one of several devices.
    """

    kind = DEVICE
    slots = 1
    can_kill = False
    shows_progress = False  # samples of a micro-batch are not seen one by one
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
        self._takes_parts = bool(pipeline.cuts) and may_retire  # samples may come cut from the CPU lane
        at = CurrentStep()
        self._executors = {
            split: DeviceExecutor(pipeline, split, device=device, max_batch=micro_batch, threads=threads, at=at)
            for split in (pipeline.host_prefix, *pipeline.cuts)
        }
        self._built_first = [pipeline.host_prefix, *(pipeline.cuts if self._takes_parts else ())]  # split points
        self._links, self._transfers = links, transfers
        self._work = DeviceWork(
            pipeline,
            self._executors,
            at,
            Store(-1, links),
            transfers,
            device,
            give_up=self._give_up,
            report=self._report,
            next_task=self._next_task,
        )
        self._peeked: deque[Task | None] = deque()  # taken from the queue and not begun
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._messages: deque[Message] = deque()
        self._progress_wanted = False  # ``look`` was called: answer with Progress
        self._offered = Offers(frozenset())
        self._unreported: dict[tuple[int, int], Task] = {}  # tasks that are not reported, by run and chunk
        self._hung = False
        self._may_retire = may_retire
        self.retired = self._gave_up = False
        self._dali_imported = "nvidia.dali.fn" in sys.modules
        self._built = threading.Event()  # set when graphs are built, or will not be
        self._thread: OwnThread | None = OwnThread(target=self._main, name=f"minato-{name}", daemon=True)
        self._thread.start()

    def await_graphs(self) -> None:
        """Waits until graphs are built, for a second at most, if DALI was imported before the lane was made.

        Building holds the interpreter lock, so nothing is lost by waiting, and no delivery is interrupted. Importing
        DALI takes another half second, during which the CPU lane delivers batches: then the lane does not wait.
        """
        if self._dali_imported:
            self._built.wait(1.0)

    def send(self, task: Task, worker: int = 0) -> None:
        self._tasks.put(task)

    def recall(self) -> None:
        out = []
        try:
            while (task := self._tasks.get_nowait()) is not None:
                out.append((task.run, task.chunk))
        except queue.Empty:
            pass
        if out:
            self._post(Recalled(tuple(out)))

    def look(self) -> None:
        self._progress_wanted = True

    def receive(self, only: Sequence[Number] = ()) -> Sequence[Message]:
        """Returns the messages posted since the last call, and ``Progress`` after a ``look``. Finished tasks are posted
        at once, so ``only`` is ignored."""
        if self._thread is None:
            return []
        if self._takes_parts:
            self._post_offers()
        messages: list[Message] = [self._messages.popleft() for _ in range(len(self._messages))]
        if self._progress_wanted:
            self._progress_wanted = False
            messages.append(Progress(self._work.at_work()))
        return messages

    def _post_offers(self) -> None:
        offers = Offers(frozenset(split for split in self._cuts if self.offers(split)))
        if offers != self._offered:
            self._offered = offers
            self._messages.append(offers)

    def who(self, worker: int) -> str:
        return f"{self.name} lane (a thread of the training process)"

    def stack_of_hung(self, worker: int) -> str:
        self._hung = True
        return self._stack()

    def stacks_at_work(self) -> str:
        return f"\n{self.who(0)} is at work.{self._stack()}" if self._work.at_work() else ""

    def _stack(self) -> str:
        thread = self._thread
        return "" if thread is None else f"\nIts thread is at:\n{stacks.of_thread(thread)}"

    def close(self, timeout: float) -> bool:
        """Waits for the micro-batches in flight, then frees graphs and memory. Idempotent.

        Returns False when the lane has hung and still does after ``timeout`` seconds: its thread and memory then stay.
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
        self._messages.clear()  # messages hold device memory
        self._unreported.clear()
        for executor in self._executors.values():
            executor.close()
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
                closing = self._step() or closing
            except BaseException as error:
                self._break_down(error)
        work.close()

    def _open(self) -> None:
        """Imports what the stages need and builds graphs. Without these libraries the lane retires; as the only lane it
        runs the CPU implementations."""
        if self._transfers is not None:
            self._transfers.accelerator.enter()
        try:
            self._work.open(self._built_first)
            self._built.set()
        except ImportError as error:
            how = "pip install 'minato-gpu[cuda13]' (or cuda12)"
            say_once(f"the pipeline runs on the CPU alone: the device lane needs {error.name}; {how}")
            if self._may_retire:
                self._retire()
                return
        except Exception as error:
            self._fail(error, "cannot be opened")
            return
        self._post(Opened(self.slots))

    def _step(self) -> bool:
        """Begins the next task, or ends the oldest in flight when none waits. Returns True when the lane is to
        close."""
        try:
            task = self._peeked.popleft() if self._peeked else self._tasks.get(block=not self._work.under_way)
        except queue.Empty:
            self._work.end()
            return False
        if task is not None and self.retired:
            self._report(_untouched(task))
        elif task is not None:
            self._unreported[task.run, task.chunk] = task
            self._work.begin(task)
        return task is None

    def _next_task(self) -> Task | None:
        """Returns the task after the current one, once; None where no other has been sent."""
        if self._peeked:
            return None
        try:
            self._peeked.append(self._tasks.get_nowait())
        except queue.Empty:
            return None
        task = self._peeked[-1]
        if task is not None:
            self._unreported[task.run, task.chunk] = task
        return task

    def _report(self, report: Report) -> None:
        self._unreported.pop((report.run, report.chunk), None)
        self._post(report)

    def _break_down(self, error: BaseException) -> None:
        """Handles an error of the lane itself: drops the tasks in flight and reports them as untouched."""
        traceback.clear_frames(error.__traceback__)  # they hold samples
        if isinstance(error, BrokenDown):
            error = error.why
            traceback.clear_frames(error.__traceback__)
        self._work.abandon()
        self._peeked = deque(task for task in self._peeked if task is None)
        self._fail(error, "has broken down")
        for task in list(self._unreported.values()) if self._may_retire else ():
            self._report(_untouched(task))

    def _fail(self, error: BaseException, what: str) -> None:
        """Retires the lane with a warning, or posts ``Broken`` when there is no CPU lane. ``what`` completes "the lane
        ..."."""
        if self._may_retire:
            self._give_up(what, repr(error))
        else:
            self.retired = True
            self._post(Broken(error))

    def _retire(self) -> None:
        if not self.retired:
            self.retired = True
            self._post(Retired())

    def _post(self, message: Message) -> None:
        self._messages.append(message)
        self._links.announce(opened=isinstance(message, Opened))

    def offers(self, split: int) -> bool:
        """Returns True when samples handed over at ``split`` would find their graph built, and the lane has not
        retired."""
        return self._executors[split].built and not self.retired

    def _give_up(self, what: str, why: str) -> None:
        """Retires the lane with a warning; the only lane stays, and prepares samples on its thread by their CPU
        implementations. ``what`` completes "the lane ..."."""
        if self._gave_up:
            return
        self._gave_up = True
        alone = "without a CPU lane, this one prepares them on one core: leave lanes out"
        others = self._who_continues() if self._may_retire else alone
        LOGGER.warning("the %s lane %s; %s (%s)", self.name, what, others, why)
        if self._may_retire:
            self._retire()

    def _who_continues(self) -> str:
        """Names the lanes that go on, for a warning."""
        alone = self.name == "device"
        return "the CPU lane goes on alone" if alone else "the CPU lane and other devices go on without it"

    def stats(self) -> dict[str, bool | int | float]:
        """Returns the micro-batch size (the smallest), out-of-memory events, samples copied to the host for lack of
        room, and whether the lane has retired."""
        executors = self._executors.values()
        return {
            "micro_batch": min(executor.size.limit for executor in executors),
            "short_of_memory": sum(executor.short for executor in executors),
            "spilled_to_host": self._work.outlet.spilled,
            "retired": self.retired,
        }


def _untouched(task: Task) -> Report:
    """Returns a final report of a task of which nothing was done, so that the scheduler sends it elsewhere."""
    now = perf_counter()
    return Report(task.run, task.chunk, worker=0, first=0, done=0, seconds=0.0, begin=now, end=now, final=True)
