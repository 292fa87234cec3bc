"""Lanes by kind: any number of them beside the loader's own workers, each with workers of its own."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from minato_gpu import DataLoader
from minato_gpu.lanes.base import Task
from tests.support.lane_beside import LaneBeside, beside

pytestmark = pytest.mark.usefixtures("no_leaks")


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


def test_a_lane_of_the_list_takes_part() -> None:
    one, two = LaneBeside(row, name="one"), LaneBeside(row, name="two", slots=2)
    loader = with_lanes(one, two)
    assert [key for batch in loader for key in keys_of(batch)] == list(range(64))
    lanes = loader.stats()["lanes"]
    assert one.all_tasks and two.all_tasks and sum(lane["samples"] for lane in lanes.values()) == 64
    assert (lanes["cpu"]["slots"], lanes["one"]["slots"], lanes["two"]["slots"]) == (1, 1, 2)


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
