"""Who is to blame for a worker's death: decided from what it showed, without a process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from minato_gpu.engine.deaths import LOOPS, STARTS, Deaths
from minato_gpu.engine.parts import Parts
from minato_gpu.engine.run import Run
from minato_gpu.lanes.base import Features, Handed
from minato_gpu.lanes.contract import Exit
from minato_gpu.lanes.processes import WorkerDied
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory.status_board import REPORTING, Claim
from minato_gpu.observe.telemetry import Telemetry
from minato_gpu.scheduling.flights import Flight
from minato_gpu.scheduling.messages import Chunk
from minato_gpu.scheduling.spans import cut
from tests.engine.test_assembly import Floor
from tests.lanes.harness import open_links
from tests.support.tickets import spans

EXIT = Exit(0, 4711, -signal.SIGKILL)
CHUNK = Chunk(7, "elsewhere", "run", spans((0, 4), (6, 8)), 0.0)


@pytest.fixture
def links() -> Iterator[WorkerChannels]:
    with open_links(1) as links:
        yield links


@pytest.fixture
def floor(links: WorkerChannels) -> Floor:
    return Floor(links)


def judge(deaths: Deaths, floor: Floor, started: int, stage: int, done: int = 0, stop: int = 6) -> Any:
    exit_ = replace(EXIT, claim=Claim(1, 7, started, stage))
    return deaths.judge(exit_, CHUNK.lane, CHUNK.spans, done, stop, floor.assembly)


@pytest.mark.parametrize("handed", [False, True], ids=["read", "handed over"])
def test_the_source_path_is_told(floor: Floor, handed: bool) -> None:
    """The worker that knew it is dead, but what it had read before is not."""
    lies = floor.worker.put(({"path": "/data/3.jpg", "x": 3}, None))
    floor.assembly.samples.inspected(spans((3, 4)), [Handed(lies, 1) if handed else Features(lies, ()).fields])
    deaths = Deaths(("read", "blur"))
    assert judge(deaths, floor, 4, 2).items == []
    verdict = judge(deaths, floor, 4, 2)
    assert verdict.settled == (3, 4)
    origin = verdict.items[0].origin
    assert (origin.index, origin.stage, origin.lane, origin.path) == ("k3", "blur", "elsewhere", "/data/3.jpg")


def test_of_a_report_the_samples_come_one_by_one(floor: Floor) -> None:
    """Then the report is of one sample alone, and that one is to blame."""
    deaths = Deaths()
    assert judge(deaths, floor, 6, REPORTING, done=1).items == []
    assert deaths.singly(spans((1, 2))) and deaths.singly(spans((7, 8))) and not deaths.singly(spans((0, 1), (4, 6)))
    assert judge(deaths, floor, 3, REPORTING, done=2, stop=3).items == []
    verdict = judge(deaths, floor, 3, REPORTING, done=2, stop=3)
    assert verdict.settled == (2, 3) and verdict.items[0].origin.stage == "send"


@pytest.mark.parametrize("started", [0, 2])
def test_a_task_that_kills_before_it_is_begun_ends_the_loader(floor: Floor, started: int) -> None:
    deaths = Deaths()
    for _ in range(LOOPS - 1):
        assert judge(deaths, floor, started, 0, done=started).items == []
    with pytest.raises(WorkerDied, match=r"log\. 5 workers have died with one task, and at none of its samples"):
        judge(deaths, floor, started, 0, done=started)


def test_workers_that_never_take_any_work_end_the_loader() -> None:
    deaths, idle = Deaths(), replace(EXIT, claim=Claim(0, -1, 0, 0))
    for _ in range(STARTS - 1):
        deaths.check_start("cpu", idle)
    with pytest.raises(WorkerDied, match="before they had taken any work"):
        deaths.check_start("cpu", idle)


def test_a_new_run_begins_to_count_anew(floor: Floor) -> None:
    """Its tickets have the numbers of the last one's."""
    deaths = Deaths()
    assert judge(deaths, floor, 4, 0).items == []
    deaths.begin_run()
    assert judge(deaths, floor, 4, 0).items == []
    assert judge(deaths, floor, 4, 0).settled == (3, 4)


@pytest.mark.parametrize(("stop", "repeated"), [(6, 3), (4, 2), (2, 0)])
def test_what_others_repeat_was_begun_and_neither_reported_nor_taken_back(
    floor: Floor, stop: int, repeated: int
) -> None:
    events: list[Any] = []

    def handle(event: Any) -> list[Any]:
        events.append(event)
        return []

    flight = Flight(replace(CHUNK, spans=cut(CHUNK.spans, 0, stop)), ())
    flight.done = 2
    scheduler = SimpleNamespace(handle=handle, flights={CHUNK.number: flight})
    run, log = Run(1, Parts(cast(Any, None), {}, floor.assembly)), Telemetry(0.0)
    run.scheduler = cast(Any, scheduler)
    run.lost(cast(Any, SimpleNamespace(name="cpu")), replace(EXIT, claim=Claim(1, CHUNK.number, 5, 0)), log)
    assert log.repeated == repeated and events[0].chunk == CHUNK.number
