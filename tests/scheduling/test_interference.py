"""Doing no harm: the slope is found; the device is left alone while the CPU lane keeps up, used when it does not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling import replay
from minato_gpu.scheduling.interference import AFTER_WAIT, LEARNED, MOST, DeviceInterference
from minato_gpu.scheduling.policy import Policy
from minato_gpu.simulation.scenarios import Scenario, hybrid_costs
from minato_gpu.simulation.virtual import VirtualLoader
from minato_gpu.simulation.work import Outcome, Work

SLOTS, BATCH = 14, 64
KEEPS_UP_S = BATCH * 4e-3 * np.exp(0.5) / SLOTS  # what the CPU lane needs for a batch: the costs' mean over the slots


@pytest.mark.parametrize("slope", [0.0, 0.3, 2.0])
def test_the_slope_is_that_of_step_time_against_device_work(slope: float) -> None:
    rng, harm = np.random.default_rng(1), DeviceInterference(True)
    for _ in range(400):
        work = float(rng.uniform(0.0, 0.02))
        harm.worked(work)
        harm.stepped(0.03 + slope * work + float(rng.normal(0, 2e-4)), 1.0)
    assert harm.slope == pytest.approx(slope, abs=0.1 * (1 + slope))
    assert harm.price == 1 + harm.slope


def test_work_that_never_varies_says_nothing() -> None:
    rng, harm = np.random.default_rng(1), DeviceInterference(True)
    for _ in range(200):
        harm.worked(0.01)
        harm.stepped(0.03 * float(rng.lognormal(0, 0.1)), 1.0)
    assert harm.slope < 0.05


def test_a_pause_is_no_step() -> None:
    harm = DeviceInterference(True)
    for number in range(100):
        harm.worked(0.001 * (number % 3))
        harm.stepped(60.0 if number == 50 else 0.03, 1.0)
    assert harm.step_s < 0.06 and 0 <= harm.slope <= MOST


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


def test_nothing_is_spared_or_priced_where_the_policy_does_not_ask_for_it() -> None:
    harm = DeviceInterference(False)
    for number in range(100):
        harm.worked(0.01 * (number % 2))
        assert not harm.stepped(0.1 + 0.01 * (number % 2), 0.01)
    assert (harm.spare, harm.price) == (False, 1.0)


def work(harm: float = 0.0) -> Work:
    scenario = Scenario("harm", "", hybrid_costs, BATCH, (8000,), SLOTS, (256,), devices=1)
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


def test_a_consumer_that_is_faster_than_the_cpu_lane_gets_the_device_too() -> None:
    for period in (0.0, 0.6 * float(KEEPS_UP_S)):
        _, before = simulate(period, spares=False)
        loader, after = simulate(period, spares=True)
        assert len(loader.made_on) > 1000
        assert after.makespan_s < 1.05 * before.makespan_s


def test_a_run_with_prices_replays_to_the_same_instructions() -> None:
    policy = replace(POLICY, spares_device=True)
    loader = VirtualLoader(work(1.0), policy, 1.5 * float(KEEPS_UP_S))
    lines, handle = [replay.header(policy)], loader.scheduler.handle

    def recorded(event: m.Event) -> list[m.Instruction]:
        said = handle(event)
        lines.append(replay.line(event, said))
        return said

    loader.scheduler.handle = recorded  # type: ignore[method-assign]
    loader.run()
    assert replay.verify(lines) == len(lines) - 1


def test_a_step_with_several_devices_is_a_round() -> None:
    """A consumer of four devices takes four batches together; what device work adds shows in the whole round."""
    rng, harm = np.random.default_rng(1), DeviceInterference(True, devices=4)
    for _ in range(400):
        work = rng.uniform(0, 0.05)
        harm.worked(4 * work)
        for number in range(4):
            harm.stepped(1e-5 if number else 0.1 + 0.5 * work, 0.02)
    assert harm.slope == pytest.approx(0.5, abs=0.1)
    assert harm.step_s == pytest.approx(0.1 + 0.5 * 0.025, rel=0.05)
    assert harm.spare, "the CPU lane needs 0.08 s for what the consumer takes in 0.11 s"
