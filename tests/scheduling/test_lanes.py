"""Any number of lanes of a kind: what they can do is summed over, and each is as fast as it turns out to be; which of
several devices gets what next, and when a device gets nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minato_gpu.lab.simulation.scenarios import Scenario, hybrid_costs
from minato_gpu.lab.simulation.virtual_lane import SampleProgress, VirtualLane
from minato_gpu.lab.simulation.virtual_loader import FarNode, VirtualLoader
from minato_gpu.lab.simulation.work import Outcome, Work
from minato_gpu.samples import SourceBatch, TicketId
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.interference import AFTER_WAIT, LEARNED, DeviceInterference
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.scheduler import Scheduler
from tests.scheduling.model import Shell

EVEN = m.LaneCosts(1000, 0.01, 0.0)
SIZE = 8


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
@pytest.mark.parametrize(("speed", "away_s"), [(0.5, 0.0), (1.0, 0.04), (2.0, 0.01)])
def test_a_lane_elsewhere_is_as_fast_as_it_turns_out_to_be(speed: float, away_s: float, costs_known: bool) -> None:
    """Beside four slots here, four that are so fast, and whose reports take so long."""
    costs = np.random.default_rng(3).gamma(4.0, 0.0025, 4096)
    work = Work(costs, costs if costs_known else np.full(4096, np.nan), SIZE, (4096,), 4)
    far = {"there": FarNode(4, lambda now, samples: now + away_s)}
    loader = VirtualLoader(work, Policy(window=256), far=far)
    there = replace(work, cpu=costs / speed)
    loader._lanes["there"] = VirtualLane("there", there, SampleProgress(there), loader._ends)
    seconds = loader.run().makespan_s
    learned = loader.scheduler.lane_costs["there"]
    assert learned.speed == pytest.approx(speed, rel=0.15)
    assert learned.lease_s == pytest.approx(away_s, rel=0.5, abs=2e-3)
    assert float(costs.sum()) / (4 + 4 * speed) > 0.9 * seconds
    here = loader.scheduler.lane_costs["cpu"]
    assert (here.speed, here.lease_s) == (1.0, 0.0), "lanes of this host are the measure"


# --- several device lanes, and a device that is left alone while the CPU lane keeps up -----------------------------


BATCH, DEVICES = 8, 4
COST_S = 4e-3


def policy(**changes: Any) -> Policy:
    """Devices that prepare everything, in any order."""
    usual: dict[str, Any] = {"fixed": False, "max_lateness": 3, "device_s": 0.1, "device_ahead": 2, "micro_batch": 4}
    return Policy(**{"window": 3 * BATCH * DEVICES, "cpu_runs": False, "devices": DEVICES, **usual, **changes})


def opened(shell: Shell, devices: int = DEVICES) -> Shell:
    for number in range(devices):
        shell.open(f"device:{number}", 1)
    return shell


def test_devices_are_served_in_rounds_so_that_none_starves() -> None:
    """What is there is for all of them; the first does not fill its queue before the last has begun."""
    shell = opened(Shell(policy()))
    for _ in range(2):
        shell.admit(BATCH, 0, [COST_S] * BATCH, [COST_S] * BATCH)
    assert Counter(chunk.lane for chunk in shell.held.values()) == {f"device:{n}": 1 for n in range(DEVICES)}
    for _ in range(2):
        shell.admit(BATCH, 0, [COST_S] * BATCH, [COST_S] * BATCH)
    assert Counter(chunk.lane for chunk in shell.held.values()) == {f"device:{n}": 2 for n in range(DEVICES)}


@pytest.mark.parametrize("home", ["device:0", "device:1"])
def test_reading_goes_on_while_a_device_is_not_there_yet(home: str) -> None:
    """Its samples wait for it on their own side: whoever only reads finds the next that is to be read."""
    scheduler = Scheduler(policy(fixed=True, max_lateness=0, devices=2, inspect=True))
    todo: list[m.Event] = [m.LaneOpened(0.0, m.CPU, 1), m.LaneOpened(0.0, home, 1, m.DEVICE)]
    places = [(SourceBatch(at), 0, TicketId(at * BATCH), BATCH) for at in range(8)]
    todo += [m.Admitted(0.0, *place, home=f"device:{place[0] % 2}") for place in places]
    read: set[int] = set()
    made: dict[int, str] = {}
    for event in todo:
        for said in scheduler.handle(event):
            if not isinstance(said, m.Dispatch):
                continue
            chunk, costs = said.chunk, [COST_S] * said.chunk.size
            serials = {serial for lo, hi in chunk.spans for serial in range(lo, hi)}
            if chunk.kind == "inspect":
                read |= serials
                todo.append(m.Inspected(0.0, chunk.number, costs, costs))
            else:
                made.update(dict.fromkeys(serials, chunk.lane))
                todo.append(m.Finished(0.0, chunk.number, chunk.size, 0.01))
    assert read == set(range(8 * BATCH))
    assert made == {serial: home for serial in read if f"device:{serial // BATCH % 2}" == home}
    other = "device:1" if home == "device:0" else "device:0"
    then = scheduler.handle(m.LaneOpened(1.0, other, 1, m.DEVICE))
    assert {each.chunk.lane for each in then if isinstance(each, m.Dispatch)} == {other}


SLOTS, LARGE = 14, 64
KEEPS_UP_S = LARGE * 4e-3 * np.exp(0.5) / SLOTS  # what the CPU lane needs for a batch: the costs' mean over the slots


@pytest.mark.parametrize("slope", [0.0, 0.3, 2.0])
def test_the_slope_is_that_of_step_time_against_device_work(slope: float) -> None:
    rng, harm = np.random.default_rng(1), DeviceInterference(True)
    for _ in range(400):
        work = float(rng.uniform(0.0, 0.02))
        harm.worked(work)
        harm.stepped(0.03 + slope * work + float(rng.normal(0, 2e-4)), 1.0)
    assert harm.slope == pytest.approx(slope, abs=0.1 * (1 + slope))
    assert harm.price == 1 + harm.slope


def test_the_device_is_spared_once_steps_are_known_and_not_while_the_consumer_has_waited() -> None:
    harm = DeviceInterference(True)
    for number in range(1, LEARNED + 1):
        assert harm.stepped(0.1, 0.05) == (number == LEARNED)
    assert harm.spare
    assert not harm.stepped(0.1, 0.09), "between the two limits nothing changes"
    harm.waited()
    for _ in range(AFTER_WAIT - 1):
        assert not harm.stepped(0.1, 0.05)
    assert harm.stepped(0.1, 0.05) and harm.spare
    assert harm.stepped(0.1, 0.2) and not harm.spare


def work(harm: float = 0.0) -> Work:
    scenario = Scenario("harm", "", hybrid_costs, LARGE, (8000,), SLOTS, (256,), devices=1)
    return replace(scenario.work(1, 0.3), harm=harm)


POLICY = Policy(window=256, micro_batch=1, ahead_s=2e-4)


def simulate(period: float, *, spares: bool, harm: float = 0.0) -> tuple[VirtualLoader, Outcome]:
    loader = VirtualLoader(work(harm), replace(POLICY, spares_device=spares), period)
    return loader, loader.run()


def test_a_consumer_that_the_cpu_lane_can_feed_keeps_its_device_to_itself() -> None:
    """Its steps are then not slowed down, so the epoch ends sooner than with a device lane that works for nothing."""
    period = 1.5 * float(KEEPS_UP_S)
    always, before = simulate(period, spares=False, harm=1.0)
    spared, after = simulate(period, spares=True, harm=1.0)
    assert len(always.made_on) > 1000
    assert len(spared.made_on) < 0.25 * len(always.made_on)
    assert after.makespan_s < 0.85 * before.makespan_s
    assert sorted(after.serials.tolist()) == list(range(8000))
