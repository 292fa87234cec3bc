"""Lanes by kind: any number of them beside the loader's own workers, each with workers of its own."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from minato_gpu import DataLoader
from minato_gpu.engine import engine
from minato_gpu.lanes.base import Task
from minato_gpu.lanes.contract import Exit, Opened, Progress
from minato_gpu.memory.status_board import ATTENTION, NOBODY, Claim
from tests.support.lane_beside import LaneBeside, beside
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("no_leaks")

REPLACES: Any = {"on_worker_death": "replace"}


def row(key: int) -> Any:
    """A sample whose every element is its key."""
    return np.full(8, key)


class Rows:
    """A data set of such samples."""

    def __init__(self, length: int = 64, make: Any = row) -> None:
        self.length, self.make = length, make

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key: int) -> Any:
        return self.make(key)


def with_lanes(*lanes: LaneBeside, dataset: Any = None, opens: bool = True, **more: Any) -> Any:
    """A loader with one worker thread and these lanes, batches of four."""
    arguments: dict[str, Any] = {"num_workers": 1, "worker_kind": "thread", "timeout": 30, **more}
    samples: Any = dataset or Rows()
    return beside(DataLoader(samples, 4, **arguments), *lanes, opens=opens)


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
        assert gate.wait(30)
        return row(key)

    lane = LaneBeside(row, on_task=gives_back, on_host=True)
    batches = with_lanes(lane, dataset=Rows(make=make), collate_fn=collate_fn, in_order=False, max_lateness=8)
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
    batches = iter(with_lanes(lane, dataset=Rows(200), collate_fn=np.stack, worker_kind="process", **REPLACES))
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
        assert key < self._free or self.gate.wait(30)
        return row(key)


@pytest.mark.parametrize("changes", [False, True], ids=["", "descriptors change"])
def test_a_lane_wakes_the_thread_that_pumps(changes: bool) -> None:
    """While the consumer is away and the worker is at a sample, what the lane tells brings it the next task."""

    def holds(lane: LaneBeside, task: Task) -> None:
        if min(piece.position for piece in task.pieces) < 4:
            lane.do(task)

    lane, samples = LaneBeside(row, on_task=holds), Gated(free=4)
    batches = iter(with_lanes(lane, dataset=Rows(make=samples), prefetch_factor=8))
    try:
        next(batches)
        assert wait_until(lambda: len(lane.tasks) > 0)
        for _ in range(3):
            before = len(lane.all_tasks)
            if changes:
                lane.change_descriptor()
            for task in lane.tasks.copy():
                lane.do(task)
            assert wait_until(lambda before=before: len(lane.all_tasks) > before)  # type: ignore[misc]
    finally:
        samples.gate.set()


def test_a_lane_wakes_the_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody looks without being woken."""
    monkeypatch.setattr(engine, "_LONGEST_SLEEP_S", 60.0)

    def later(lane: LaneBeside, task: Task) -> None:
        lane.change_descriptor()
        threading.Timer(0.01, lane.do, (task,)).start()

    lane, samples = LaneBeside(row, on_task=later), Gated()
    batches = iter(with_lanes(lane, dataset=Rows(make=samples), in_order=False, max_lateness=8))
    try:
        assert len(keys_of(next(batches))) == 4
    finally:
        samples.gate.set()


def test_a_lane_that_never_opens_keeps_nobody_awake() -> None:
    """Once nothing waits for a free slot, reports of the worker wake nobody; what the lane tells later is heard."""
    lane = LaneBeside(row)
    batches = iter(with_lanes(lane, opens=False))
    next(batches)
    words = batches._engine._links.board.words
    assert wait_until(lambda: words[ATTENTION] == NOBODY)
    for message in (Progress(()), Progress(()), Opened(1)):
        lane.tell(message)
        assert wait_until(lambda: lane.is_heard)
