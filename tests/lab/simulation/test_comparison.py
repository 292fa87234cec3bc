"""Rows of the simulation: the same twice, never better than their bounds, and what rescue is worth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from minato_gpu.lab.simulation import comparison
from minato_gpu.lab.simulation.bounds import held_bound, lp_bound, threshold_limit
from minato_gpu.lab.simulation.peers import BATCH_IN_ORDER, BATCH_OUT_OF_ORDER, BY_COMPLETION, PEERS, simulate_peer
from minato_gpu.lab.simulation.scenarios import SCENARIOS, Scenario
from minato_gpu.lab.simulation.work import Work

KEYS = {
    *("scenario", "policy", "window", "max_lateness", "prediction_error", "bound_s", "makespan_s", "of_bound"),
    *("of_limit", "efficiency", "first_batch_s", "displacement_p50", "displacement_p99", "displacement_max"),
}


def small(name: str) -> Scenario:
    """The scenario with a twentieth of its samples."""
    scenario = SCENARIOS[name]
    epochs = tuple(max(samples // 20, 2 * scenario.batch) for samples in scenario.epoch_samples[:6])
    return replace(scenario, epoch_samples=epochs, windows=scenario.windows[:1], errors=scenario.errors[-1:])


def test_rows_are_complete_and_the_same_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    scenarios = {name: small(name) for name in SCENARIOS if name != "large"}
    monkeypatch.setattr(comparison, "SCENARIOS", scenarios)
    rows = comparison.run(list(scenarios), seeds=1)
    assert rows == comparison.run(list(scenarios), seeds=1)
    assert {frozenset(row) for row in rows} == {frozenset(KEYS)}
    for row in rows:
        assert 0 < row["of_bound"] <= 1 + 1e-9
        assert 0 < row["efficiency"] <= 1 + 1e-9
        assert row["of_limit"] >= row["of_bound"]
        if row["max_lateness"] == 0:
            assert row["displacement_max"] == 0
    assert {row["policy"] for row in rows} == {comparison.OURS, *PEERS}


def test_rescue_helps_where_samples_are_slow_that_nobody_could_know_of() -> None:
    scenario = replace(SCENARIOS["surprise-cut"], epoch_samples=(1200,), surprise=(0.01, 30.0, 1.0))
    times: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(4):
        for rescue, found in times.items():
            simulate = comparison.ours(scenario, 128, 0, rescue=rescue)
            found.append(simulate(scenario.work(seed, 0.3), 0.0).makespan_s)
    assert 1.04 * np.mean(times[True]) < np.mean(times[False])


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("lateness", [0, 8])
def test_everything_is_delivered_once_and_no_later_than_allowed(name: str, lateness: int) -> None:
    scenario = small(name)
    work = scenario.work(0, 0.3)
    window = scenario.windows[0]
    bound = lp_bound(work)
    for policy in (comparison.OURS, *PEERS):
        for period in (0.0, bound / work.batches):
            ours = policy == comparison.OURS
            simulate = (
                comparison.ours(scenario, window, lateness) if ours else comparison.peer(policy, window, lateness)
            )
            outcome = simulate(work, period)
            assert sorted(outcome.serials.tolist()) == list(range(len(work.cpu)))
            if policy != BATCH_OUT_OF_ORDER:  # there a short last batch moves the places of those after it
                late = np.repeat(np.arange(work.batches), work.sizes) - work.places(outcome.serials)
                assert late.max() <= lateness
            assert (np.diff(outcome.times) >= period - 1e-9).all()
            assert outcome.makespan_s >= bound - 1e-9
            assert outcome.makespan_s + period >= held_bound(work, window, lateness, period) - 1e-9
    assert threshold_limit(work) >= bound


def test_with_nothing_to_decide_the_scheduler_does_what_first_come_first_served_does() -> None:
    """Two independent simulations of the same policy, sample by sample in order, agree to the last digit."""
    scenario = replace(small("burst"), stagger_s=5e-3)
    work = scenario.work(3, 0.3)
    period = lp_bound(work) / work.batches
    plain = comparison.ours(scenario, 256, 0, early=False, reserve=False, ahead_s=0.0, lease_share=0.0)
    peer = simulate_peer(BY_COMPLETION, work, 256, 0, period)
    assert plain(work, period).times == pytest.approx(peer.times)


def test_batches_in_rotation_take_what_a_hand_calculation_says() -> None:
    cpu = np.array([1.0, 1.0, 5.0, 5.0, 1.0, 1.0, 1.0, 1.0])
    work = Work(cpu, cpu, 2, (8,), 2)
    assert simulate_peer(BATCH_IN_ORDER, work, 4, 0, 0.0).times.tolist() == [2.0, 10.0, 10.0, 12.0]
    assert simulate_peer(BATCH_OUT_OF_ORDER, work, 4, 8, 0.0).times.tolist() == [2.0, 4.0, 6.0, 10.0]
    alone = replace(work, slots=0)
    assert simulate_peer(BATCH_IN_ORDER, alone, 0, 0, 3.0).times.tolist() == [2.0, 15.0, 20.0, 25.0]
