"""Lanes by kind: any number of them beside the loader's own workers, each with workers of its own."""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from minato_gpu import DataLoader
from minato_gpu.engine import engine
from minato_gpu.lanes.base import Item, Local, Report, Task
from minato_gpu.lanes.contract import Exit, Lane, Message, Number, Opened, Progress, Recalled
from minato_gpu.memory.layout import Layout
from minato_gpu.memory.status_board import ATTENTION, NOBODY, Claim
from minato_gpu.scheduling.messages import CPU
from tests.contracts.datasets import Made
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("no_leaks")

REPLACES: Any = {"on_worker_death": "replace"}


class LaneBeside(Lane):
    """A CPU lane in the test's own hands: beside a loader's workers, and told what to say.

    ``make`` prepares sample ``key``. ``on_task`` is called with each task that is sent, which by default is done at
    once. ``all_tasks``: those that were ever sent; ``tasks``: that have not ended.
    """

    kind, name, slots = CPU, "beside", 1
    shows_progress = False
    advice = "It is the test's."

    def __init__(
        self,
        make: Callable[[int], Any],
        *,
        on_task: Callable[[LaneBeside, Task], None] = lambda lane, task: lane.do(task),
        on_host: bool = False,
        can_kill: bool = False,
    ) -> None:
        self.on_host, self.can_kill = on_host, can_kill
        self.replaced: list[tuple[int, Sequence[tuple[int, int]]]] = []
        self.tasks: list[Task] = []
        self.all_tasks: list[Task] = []
        self._make, self._on_task = make, on_task
        self._told: deque[Message] = deque()
        self._looks = False
        self._lock = threading.Lock()  # a timer of the test's may come after the lane was closed
        self._links: Any = None  # while it is open

    def open(self, job: Any, links: Any) -> Iterable[Lane]:
        self._links = links
        return [self]

    def tell(self, *messages: Message) -> None:
        """From any thread."""
        with self._lock:
            self._told.extend(messages)
            for message in messages if self._links is not None else ():
                self._links.announce(opened=isinstance(message, Opened))

    @property
    def is_heard(self) -> bool:
        """Whether all that it has told has been received."""
        return not self._told

    def do(self, task: Task, samples: int | None = None) -> None:
        """Prepare so many samples of the task, if not all, or the batch that it joins, and end it."""
        keys = [key for piece in task.pieces for key in piece.keys][:samples]
        prepared = [Local(self._make(key), 8) for key in keys]
        items: list[Item] = [*prepared]
        if task.kind == "collate" and samples is None:
            joined = Local(np.stack([item.value for item in prepared]), 8, True)
            items = [joined, *[None] * (len(prepared) - 1)]
        with self._lock:
            if task not in self.tasks:  # recalled meanwhile
                return
            self.tasks.remove(task)
        took, end = [0.01] * len(items), perf_counter()
        head = task.run, task.chunk, 0, 0, len(items), sum(took), end - sum(took), end, True
        ended = Report(*head, items, took)
        layout = pickle.dumps(Layout.of(prepared[0].value)) if prepared and task.layout == b"" else None
        self.tell(ended._replace(layout=layout) if items else ended._replace(items=None))

    def send(self, task: Task, worker: int = 0) -> None:
        self.all_tasks.append(task)
        self.tasks.append(task)
        self._on_task(self, task)

    def recall(self) -> None:
        with self._lock:
            tasks, self.tasks = self.tasks, []
        if tasks:
            self.tell(Recalled(tuple((task.run, task.chunk) for task in tasks)))

    def look(self) -> None:
        self._looks = True

    def receive(self, only: Sequence[Number] = ()) -> Sequence[Message]:
        told = [self._told.popleft() for _ in range(len(self._told))]
        if self._looks:
            self._looks = False
            told.append(Progress(()))
        return told

    def replace(self, worker: int, blocks: Sequence[tuple[int, int]]) -> None:
        self.replaced.append((worker, blocks))
        self.tell(Opened(1))

    def who(self, worker: int) -> str:
        return f"worker {worker} of {self.name}"

    def stack_of_hung(self, worker: int) -> str:
        return ""

    def stacks_at_work(self) -> str:
        return ""

    def close(self, timeout: float) -> bool:
        with self._lock:
            self._links = None
        return True


def row(key: int) -> Any:
    """A sample whose every element is its key."""
    return np.full(8, key)


def with_lanes(*lanes: LaneBeside, dataset: Any = None, opens: bool = True, **more: Any) -> Any:
    """A loader with one worker thread and these lanes, batches of four."""
    arguments: dict[str, Any] = {"num_workers": 1, "worker_kind": "thread", "timeout": 60, **more}
    samples: Any = dataset or Made(64, row)
    loader: Any = DataLoader(samples, 4, **arguments)
    loader._session.options = replace(loader._session.options, more_lanes=lanes)
    for lane in lanes if opens else ():
        lane.tell(Opened(lane.slots))
    return loader


def keys_of(batch: Any) -> list[int]:
    """The keys of a batch of rows, all of whose elements are checked."""
    assert bool((batch == batch[:, :1]).all())
    return [int(key) for key in batch[:, 0]]


def test_what_only_this_host_can_do_goes_to_its_lanes() -> None:
    """Batches that a ``collate_fn`` joins."""
    lane = LaneBeside(row)
    batches = with_lanes(lane, collate_fn=lambda samples: np.stack(samples))
    assert [key for batch in batches for key in keys_of(batch)] == list(range(64))
    assert {task.kind for task in lane.all_tasks} == {"run"}


@pytest.mark.parametrize("collate_fn", [None, np.stack])
def test_what_is_given_back_goes_to_another(collate_fn: Any) -> None:
    """Samples, and jobs that join batches: of each kind the first task comes back by ``Recalled``, the second by a
    report of nothing. The worker is at a sample until then."""
    gate, kinds = threading.Event(), {"run", *(["collate"] if collate_fn else [])}

    def gives_back(lane: LaneBeside, task: Task) -> None:
        seen = [each.kind for each in lane.all_tasks]
        if min(map(seen.count, kinds)) >= 3:
            gate.set()
        if seen.count(task.kind) == 1:
            lane.recall()
        else:
            lane.do(task, 0 if seen.count(task.kind) == 2 else None)

    def make(key: int) -> Any:
        assert gate.wait(60)
        return row(key)

    lane = LaneBeside(row, on_task=gives_back, on_host=True)
    batches = with_lanes(lane, dataset=Made(64, make), collate_fn=collate_fn, in_order=False, max_lateness=8)
    assert sorted(key for batch in batches for key in keys_of(batch)) == list(range(64))
    assert gate.is_set()


def ends_first(lane: LaneBeside, task: Task) -> None:
    """Worker 0 ends with its first task; its replacement does all that come after."""
    if len(lane.all_tasks) > 1:
        lane.do(task)
    else:
        lane.tasks.remove(task)
        lane.tell(Exit(0, 1, -9, claim=Claim(task.run, task.chunk, 1, 0)))


def test_a_death_leaves_alone_what_belongs_to_another_lane() -> None:
    """Worker 0 of a lane ends, while blocks are lent that worker 0 of the processes has laid down: they come back."""
    lane = LaneBeside(row, on_task=ends_first, can_kill=True)
    batches = iter(with_lanes(lane, dataset=Made(200, row), collate_fn=np.stack, worker_kind="process", **REPLACES))
    kept = [next(batches) for _ in range(2)]
    assert wait_until(lambda: batches._engine.log.workers["replaced"] == 1)
    rest = [key for batch in batches for key in keys_of(batch)]
    assert [key for batch in kept for key in keys_of(batch)] + rest == list(range(200))
    assert lane.replaced == [(0, ())]


class Gated:
    """Samples of the loader's own worker, which waits before each until the test lets it."""

    def __init__(self, free: int = 0) -> None:
        self.gate, self._free = threading.Event(), free

    def __call__(self, key: int) -> Any:
        assert key < self._free or self.gate.wait(60)
        return row(key)


def test_a_lane_wakes_the_thread_that_pumps() -> None:
    """While the consumer is away and the worker is at a sample, what the lane tells brings it the next task."""

    def holds(lane: LaneBeside, task: Task) -> None:
        if min(piece.position for piece in task.pieces) < 4:
            lane.do(task)

    lane, samples = LaneBeside(row, on_task=holds), Gated(free=4)
    batches = iter(with_lanes(lane, dataset=Made(64, samples), prefetch_factor=8))
    try:
        next(batches)
        assert wait_until(lambda: len(lane.tasks) > 0)
        for _ in range(3):
            before = len(lane.all_tasks)
            for task in lane.tasks.copy():
                lane.do(task)
            assert wait_until(lambda before=before: len(lane.all_tasks) > before)  # type: ignore[misc]
    finally:
        samples.gate.set()


def test_a_lane_wakes_the_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody looks without being woken."""
    monkeypatch.setattr(engine, "_LONGEST_SLEEP_S", 60.0)

    def later(lane: LaneBeside, task: Task) -> None:
        threading.Timer(0.01, lane.do, (task,)).start()

    lane, samples = LaneBeside(row, on_task=later), Gated()
    batches = iter(with_lanes(lane, dataset=Made(64, samples), in_order=False, max_lateness=8))
    try:
        assert len(keys_of(next(batches))) == 4
    finally:
        samples.gate.set()


def test_a_lane_that_never_opens_keeps_nobody_awake() -> None:
    """Once nothing waits for a free slot, reports of the worker wake nobody; that the lane has opened is heard."""
    lane = LaneBeside(row)
    batches = iter(with_lanes(lane, opens=False))
    next(batches)
    words = batches._engine._links.board.words
    assert wait_until(lambda: words[ATTENTION] == NOBODY)
    lane.tell(Opened(1))
    assert wait_until(lambda: lane.is_heard)
