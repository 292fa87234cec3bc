"""Any number of lanes of a kind: what they can do is summed over, and each is as fast as it turns out to be."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
import pytest

from minato_gpu.samples import OutputBatch, SourceBatch, TicketId
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.scheduler import Scheduler
from minato_gpu.scheduling.spans import tickets

EVEN = m.LaneCosts(1000, 0.01, 0.0)
SIZE = 8


class Lane(NamedTuple):
    """``speed``: of its slots; ``away_s``: the way there and back."""

    slots: int
    speed: float = 1.0
    away_s: float = 0.0


class Simulation:
    """An epoch of samples that cost so much, in places of ``SIZE``, through these lanes; batches are taken at once."""

    def __init__(self, lanes: dict[str, Lane], costs: Any, *, window: int, costs_known: bool) -> None:
        self.lanes, self.costs = lanes, costs
        self.scheduler = Scheduler(Policy(window=window))
        self.revoked = 0
        self.now = 0.0
        self._predicted, self._first, self._count = costs_known, 0, 0
        self._events: list[tuple[float, int, Any, Any]] = []
        self._waiting: dict[str, deque[m.Chunk]] = {name: deque() for name in lanes}
        self._free = {name: lane.slots for name, lane in lanes.items()}
        for name, lane in lanes.items():
            self._tell(m.LaneOpened(0.0, name, lane.slots, m.CPU, None, name == m.CPU))
        self._admit()
        while self._events:
            self.now, _, act, what = heappop(self._events)
            act(what)
            self._admit()

    @property
    def of_bound(self) -> float:
        """How near to the time in which all slots would be through, were none ever idle."""
        return float(self.costs.sum()) / sum(lane.slots * lane.speed for lane in self.lanes.values()) / self.now

    def _admit(self) -> None:
        while self._first < len(self.costs) and self.scheduler.room >= SIZE:
            first, self._first = self._first, self._first + SIZE
            costs = self.costs[first : first + SIZE].tolist() if self._predicted else None
            last = self._first == len(self.costs)
            place = SourceBatch(first // SIZE)
            self._tell(m.Admitted(self.now, place, 0, TicketId(first), SIZE, costs, last=last))

    def _tell(self, event: m.Event) -> None:
        for said in self.scheduler.handle(event):
            if isinstance(said, m.Dispatch):
                self._after(self.lanes[said.chunk.lane].away_s / 2, self._arrives, said.chunk)
            elif isinstance(said, m.Compose):
                self._after(0.0, self._tell, m.Delivered(self.now, OutputBatch(said.order)))
            else:
                self.revoked += 1

    def _after(self, seconds: float, act: Any, what: Any) -> None:
        self._count += 1
        heappush(self._events, (self.now + seconds, self._count, act, what))

    def _arrives(self, chunk: m.Chunk) -> None:
        self._waiting[chunk.lane].append(chunk)
        self._begin(chunk.lane)

    def _begin(self, name: str) -> None:
        if self._free[name] and self._waiting[name]:
            self._free[name] -= 1
            chunk, lane = self._waiting[name].popleft(), self.lanes[name]
            seconds = float(sum(self.costs[serial] for serial in tickets(chunk.spans))) / lane.speed
            self._after(seconds, self._ended, name)
            self._after(seconds + lane.away_s / 2, self._reported, (chunk, seconds))

    def _ended(self, name: str) -> None:
        self._free[name] += 1
        self._begin(name)

    def _reported(self, what: tuple[m.Chunk, float]) -> None:
        chunk, seconds = what
        self._tell(m.Finished(self.now, chunk.number, chunk.size, seconds))


def _opened(name: str, slots: int, kind: str = m.CPU) -> m.LaneOpened:
    return m.LaneOpened(0.0, name, slots, kind, EVEN)


def test_the_threshold_counts_the_slots_of_all_lanes() -> None:
    """A device gets what all the CPU's slots together would be slower at."""
    found = []
    for lanes in ({"cpu": 4}, {"cpu": 1, "b": 2, "c": 1}):
        scheduler = Scheduler(Policy(window=256, inspect=True))
        for name, slots in lanes.items():
            scheduler.handle(_opened(name, slots))
        scheduler.handle(_opened(m.DEVICE, 1, m.DEVICE))
        for place in range(8):
            costs = [0.01 * (1 + at) for at in range(SIZE)]
            admitted = m.Admitted(0.0, SourceBatch(place), 0, TicketId(place * SIZE), SIZE, costs, [0.004] * SIZE)
            scheduler.handle(admitted)
        found.append(scheduler._intake.router.threshold)
    assert found[0] == pytest.approx(found[1], rel=0.05) and found[0] < 20


@pytest.mark.parametrize("costs_known", [True, False])
@pytest.mark.parametrize("lane", [Lane(4, 0.5), Lane(4, 1.0, 0.04), Lane(4, 2.0, 0.01)], ids=str)
def test_a_lane_elsewhere_is_as_fast_as_it_turns_out_to_be(lane: Lane, costs_known: bool) -> None:
    costs = np.random.default_rng(3).gamma(4.0, 0.0025, 4096)
    run = Simulation({"cpu": Lane(4), "there": lane}, costs, window=256, costs_known=costs_known)
    learned = run.scheduler.lane_costs["there"]
    assert learned.speed == pytest.approx(lane.speed, rel=0.15)
    assert learned.lease_s == pytest.approx(lane.away_s, rel=0.5, abs=2e-3)
    assert run.of_bound > 0.9 and not run.revoked
    here = run.scheduler.lane_costs["cpu"]
    assert (here.speed, here.lease_s) == (1.0, 0.0), "lanes of this host are the measure"
