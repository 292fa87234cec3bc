"""CPU lanes with real workers, driven by hand."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from minato_gpu.lanes.base import Report, Task
from minato_gpu.lanes.process_lane import ProcessLane
from minato_gpu.lanes.thread_lane import ThreadLane
from tests.lanes.harness import job, marked, open_links
from tests.support.waiting import wait_until

Told = TypeVar("Told")

FORK = multiprocessing.get_context("fork")


@contextmanager
def open_lane(
    dataset: Any,
    workers: int = 1,
    *,
    threads: bool = False,
    active: int | None = None,
    **changes: Any,
) -> Iterator[Any]:
    """A lane of forked processes, or of threads; its ``links`` are an attribute. What it is sent gets marks."""
    with open_links(workers, arenas=not threads, active=active) as links:
        what = job(dataset, num_workers=workers, seeds_samples=not threads, **changes)
        lane: Any = ThreadLane(links, what) if threads else ProcessLane(links, what, FORK)
        send = lane.send
        lane.send = lambda sent, worker=0: send(marked(links, sent), worker)
        try:
            yield lane
        finally:
            assert lane.close(2.0)


def reports_of(lane: Any, *tasks: Task) -> dict[int, list[Report]]:
    """Send tasks; wait until each has its final report. All that came, by chunk."""
    for one in tasks:
        lane.send(one)
    found: dict[int, list[Report]] = {}

    def have_ended() -> bool:
        for message in lane.receive():
            if isinstance(message, Report):
                found.setdefault(message.chunk, []).append(message)
        return all(one.chunk in found and found[one.chunk][-1].final for one in tasks)

    assert wait_until(have_ended), "not every task was reported"
    return found


def of_kind(lane: Any, kind: type[Told]) -> list[Told]:
    """What of this kind the lane tells next; waits for it."""
    found: list[Told] = []

    def look() -> bool:
        found.extend(message for message in lane.receive() if isinstance(message, kind))
        return bool(found)

    assert wait_until(look), f"the lane tells no {kind.__name__}"
    return found
