"""A CPU lane in the test's own hands: beside a loader's workers, without their bell, and told what to say."""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np

from minato_gpu.lanes.base import Item, Local, Report, Task
from minato_gpu.lanes.contract import Lane, Message, Number, Opened, Progress, Recalled
from minato_gpu.memory.layout import Layout
from minato_gpu.scheduling.messages import CPU


class LaneBeside(Lane):
    """``make`` prepares sample ``key``, which is said to cost ``costs_s``. ``on_task`` is called with each task that is
    sent, which by default is done at once. ``all_tasks``: those that were ever sent; ``tasks``: that have not ended."""

    kind = CPU
    shows_progress = False
    advice = "It is the test's."

    def __init__(
        self,
        make: Callable[[int], Any],
        *,
        name: str = "beside",
        slots: int = 1,
        on_task: Callable[[LaneBeside, Task], None] = lambda lane, task: lane.do(task),
        on_host: bool = False,
        can_kill: bool = False,
        costs_s: float = 0.01,
    ) -> None:
        self._costs_s = costs_s
        self.name, self.slots, self.on_host, self.can_kill = name, slots, on_host, can_kill
        self.replaced: list[tuple[int, Sequence[tuple[int, int]]]] = []
        self.tasks: list[Task] = []
        self.all_tasks: list[Task] = []
        self._make, self._on_task = make, on_task
        self._told: deque[Message] = deque()
        self._looks = False
        self._arrived = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def open(self, job: Any, links: Any) -> Iterable[Lane]:
        """See LaneSource."""
        return [self]

    def tell(self, *messages: Message) -> None:
        """From any thread."""
        self._told.extend(messages)
        if self._arrived >= 0:
            os.eventfd_write(self._arrived, 1)

    @property
    def is_heard(self) -> bool:
        """Whether all that it has told has been received."""
        return not self._told

    def change_descriptor(self) -> None:
        """Its descriptor has another number from now on."""
        before, self._arrived = self._arrived, os.dup(self._arrived)
        os.close(before)

    def do(self, task: Task, samples: int | None = None) -> None:
        """Prepare so many samples of the task, if not all, or the batch that it joins, and end it."""
        keys = [key for piece in task.pieces for key in piece.keys][:samples]
        prepared = [Local(self._make(key), 8) for key in keys]
        items: list[Item] = [*prepared]
        if task.kind == "collate" and samples is None:
            joined = Local(np.stack([item.value for item in prepared]), 8, True)
            items = [joined, *[None] * (len(prepared) - 1)]
        self.tasks.remove(task)
        took, end = [self._costs_s] * len(items), perf_counter()
        head = task.run, task.chunk, 0, 0, len(items), sum(took), end - sum(took), end, True
        ended = Report(*head, items, took)
        layout = pickle.dumps(Layout.of(prepared[0].value)) if prepared and task.layout == b"" else None
        self.tell(ended._replace(layout=layout) if items else ended._replace(items=None))

    def send(self, task: Task, worker: int = 0) -> None:
        """See Lane."""
        self.all_tasks.append(task)
        self.tasks.append(task)
        self._on_task(self, task)

    def recall(self) -> None:
        """See Lane."""
        tasks, self.tasks = self.tasks, []
        if tasks:
            self.tell(Recalled(tuple((task.run, task.chunk) for task in tasks)))

    def look(self) -> None:
        """See Lane."""
        self._looks = True

    def receive(self, only: Sequence[Number] = ()) -> Sequence[Message]:
        """See Lane."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._arrived)
        told = [self._told.popleft() for _ in range(len(self._told))]
        if self._looks:
            self._looks = False
            told.append(Progress(()))
        return told

    def fds(self) -> list[int]:
        """See Lane."""
        return [self._arrived]

    def replace(self, worker: int, blocks: Sequence[tuple[int, int]]) -> None:
        """See Lane."""
        self.replaced.append((worker, blocks))
        self.tell(Opened(1))

    def who(self, worker: int) -> str:
        """See Lane."""
        return f"worker {worker} of {self.name}"

    def stack_of_hung(self, worker: int) -> str:
        """See Lane."""
        return ""

    def stacks_at_work(self) -> str:
        """See Lane."""
        return ""

    def close(self, timeout: float) -> bool:
        """See Lane."""
        if self._arrived >= 0:
            os.close(self._arrived)
            self._arrived = -1
        return True


def beside(loader: Any, *lanes: LaneBeside, opens: bool = True) -> Any:
    """The loader, with these lanes; they are open from the start, if they open at all."""
    session = loader._session
    session.options = replace(session.options, more_lanes=lanes)
    for lane in lanes if opens else ():
        lane.tell(Opened(lane.slots))
    return loader
