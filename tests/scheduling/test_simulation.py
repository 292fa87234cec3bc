"""The simulation: the same twice, never better than its bounds, the same policies agree, replay is identical."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling import replay, simulation
from minato_gpu.scheduling.bounds import held_bound, lp_bound, threshold_limit
from minato_gpu.scheduling.catalogue import SCENARIOS
from minato_gpu.scheduling.peers import BATCH_IN_ORDER, BATCH_OUT_OF_ORDER, BY_COMPLETION, PEERS, simulate_peer
from minato_gpu.scheduling.scenarios import Scenario, published_costs
from minato_gpu.scheduling.virtual import VirtualLoader
from minato_gpu.scheduling.work import Work

KEYS = {
    "scenario",
    "policy",
    "window",
    "max_lateness",
    "prediction_error",
    "bound_s",
    "makespan_s",
    "of_bound",
    "of_limit",
    "efficiency",
    "first_batch_s",
    "displacement_p50",
    "displacement_p99",
    "displacement_max",
    "slow_share_deviation",
}


def small(name: str) -> Scenario:
    """The scenario with a twentieth of its samples."""
    scenario = SCENARIOS[name]
    epochs = tuple(max(samples // 20, 2 * scenario.batch) for samples in scenario.epoch_samples[:6])
    return replace(scenario, epoch_samples=epochs, windows=scenario.windows[:1], errors=scenario.errors[-1:])


@pytest.fixture
def small_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    scenarios = {name: small(name) for name in SCENARIOS if name != "large"}
    monkeypatch.setattr(simulation, "SCENARIOS", scenarios)


@pytest.mark.usefixtures("small_catalogue")
def test_rows_are_complete_and_the_same_twice() -> None:
    rows = simulation.run(None, seeds=1)
    assert rows == simulation.run(None, seeds=1)
    assert {frozenset(row) for row in rows} == {frozenset(KEYS)}
    for row in rows:
        assert 0 < row["of_bound"] <= 1 + 1e-9
        assert 0 < row["efficiency"] <= 1 + 1e-9
        assert row["of_limit"] >= row["of_bound"]
        if row["max_lateness"] == 0:
            assert row["displacement_max"] == 0
    assert {row["policy"] for row in rows} == {simulation.OURS, *PEERS}


@pytest.mark.usefixtures("small_catalogue")
def test_the_ablation_has_a_row_with_everything_on_for_each_scenario() -> None:
    rows = simulation.run_ablation(seeds=1)
    whole = {row["scenario"] for row in rows if row["without"] == ""}
    assert whole == {row["scenario"] for row in rows}
    parts = {"", "cost model", "threshold", "pacing", "free order", "pacing and free order", "epoch overlap"}
    parts |= {"split points", "rescue", "rescue and free order"}
    assert {row["without"] for row in rows} == parts


def test_rescue_helps_where_samples_are_slow_that_nobody_could_know_of() -> None:
    scenario = replace(SCENARIOS["surprise-cut"], epoch_samples=(1200,), surprise=(0.01, 30.0, 1.0))
    times: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(4):
        for rescue, found in times.items():
            simulate = simulation._ours(scenario, 128, 0, rescue=rescue)
            found.append(simulate(scenario.work(seed, 0.3), 0.0).makespan_s)
    assert 1.04 * np.mean(times[True]) < np.mean(times[False])


def test_no_prediction_knows_of_a_surprise() -> None:
    scenario = SCENARIOS["surprise-cut"]
    work, calm = (one.work(4, 0.3) for one in (scenario, replace(scenario, surprise=(0.0, 1.0, 1.0))))
    assert np.array_equal(work.predicted_cpu, calm.predicted_cpu)
    assert np.array_equal(work.plans(7), calm.plans(7))
    slow = work.cpu > 1.5 * calm.cpu
    assert 0.005 < slow.mean() < 0.02
    for one, other in ((work.cpu, calm.cpu), (work.cuts[0].cpu, calm.cuts[0].cpu)):
        assert np.allclose(one[slow], 30 * other[slow]) and np.array_equal(one[~slow], other[~slow])


def test_an_unknown_scenario_is_an_error() -> None:
    with pytest.raises(KeyError, match="nonsense"):
        simulation.run(["nonsense"])


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("lateness", [0, 8])
def test_everything_is_delivered_once_and_no_later_than_allowed(name: str, lateness: int) -> None:
    scenario = small(name)
    work = scenario.work(0, 0.3)
    window = scenario.windows[0]
    bound = lp_bound(work)
    for policy in (simulation.OURS, *PEERS):
        for period in (0.0, bound / work.batches):
            ours = policy == simulation.OURS
            simulate = (
                simulation._ours(scenario, window, lateness) if ours else simulation._peer(policy, window, lateness)
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
    plain = simulation._ours(scenario, 256, 0, early=False, reserve=False, ahead_s=0.0, lease_share=0.0)
    peer = simulate_peer(BY_COMPLETION, work, 256, 0, period)
    assert plain(work, period).times == pytest.approx(peer.times)


def test_batches_in_rotation_take_what_a_hand_calculation_says() -> None:
    cpu = np.array([1.0, 1.0, 5.0, 5.0, 1.0, 1.0, 1.0, 1.0])
    work = Work(cpu, cpu, 2, (8,), 2)
    assert simulate_peer(BATCH_IN_ORDER, work, 4, 0, 0.0).times.tolist() == [2.0, 10.0, 10.0, 12.0]
    assert simulate_peer(BATCH_OUT_OF_ORDER, work, 4, 8, 0.0).times.tolist() == [2.0, 4.0, 6.0, 10.0]


def test_bounds_of_cases_that_can_be_worked_out() -> None:
    cpu = np.array([1.0, 1.0, 6.0, 1.0])
    work = Work(cpu, cpu, 2, (4,), 3)
    assert lp_bound(work) == 6.0
    assert held_bound(work, 4, 0, 0.0) == 6.0
    assert held_bound(work, 2, 0, 0.0) == 7.0  # the slow one is admitted when the first batch has gone
    assert held_bound(work, 4, 0, 5.5) == pytest.approx(6.5 + 5.5)
    late = Work(np.ones(4), np.ones(4), 2, (4,), 2, startup_s=1.0, stagger_s=1.0)
    assert lp_bound(late) == pytest.approx(3.5)  # slots from 1.0 and 2.0: four seconds of work are done by 3.5
    both = Work(np.array([8.0, 2.0]), np.ones(2), 1, (2,), 1, np.array([1.0, 1.0]), np.ones(2), 1)
    assert lp_bound(both) == pytest.approx(4 / 3)  # a third of the second sample goes to the device, after the first


@pytest.mark.parametrize(
    ("quantiles", "mean", "std"), [((11, 28, 30, 35, 176), 31, 19), ((10, 470, 630, 750, 2230), 500, 197)]
)
def test_costs_follow_the_published_table(
    quantiles: tuple[float, float, float, float, float], mean: float, std: float
) -> None:
    costs, device = published_costs(quantiles, mean, std)(np.random.default_rng(0), 100_000)
    assert device is None
    assert np.percentile(costs, [50, 75, 90, 100]) * 1e3 == pytest.approx(quantiles[1:], rel=0.02)
    assert quantiles[0] <= costs.min() * 1e3 <= quantiles[0] + 0.05 * mean
    assert costs.mean() * 1e3 == pytest.approx(mean, rel=0.02)
    assert costs.std() * 1e3 == pytest.approx(std, rel=0.06)


@pytest.mark.parametrize("fixed", [True, False])
def test_a_recorded_run_replays_to_the_same_instructions(fixed: bool) -> None:
    scenario = small("hybrid")
    policy = m.Policy(window=256, fixed=fixed, max_lateness=0 if fixed else 8, budget_bytes=200_000)
    loader = VirtualLoader(scenario.work(0, 0.3), policy)
    lines = [replay.header(policy)]
    handle = loader.scheduler.handle

    def record(event: m.Event) -> list[m.Instruction]:
        said = handle(event)
        lines.append(replay.line(event, said))
        return said

    loader.scheduler.handle = record  # type: ignore[method-assign]
    loader.run()
    assert replay.verify(lines) == len(lines) - 1
    events = [replay.parse(text)[0] for text in lines[1:]]
    assert [replay.line(*pair) for pair in zip(events, replay.replay(events, policy), strict=True)] == lines[1:]

    changed = [replay.header(replace(policy, chunk_s=0.5, micro_batch=1)), *lines[1:]]
    with pytest.raises(replay.ReplayMismatch, match="event"):
        replay.verify(changed)


@pytest.mark.parametrize("text", ['{"event": 3}', "[]", '{"policy": {}}'])
def test_a_line_that_is_no_event_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="event log"):
        replay.parse(text)


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("lateness", [0, 4])
@pytest.mark.parametrize("threshold", [True, False])
def test_several_devices(devices: int, lateness: int, threshold: bool) -> None:
    """In strict order nothing that a device has made goes to another, and each has its share of the work."""
    rng, samples = np.random.default_rng(devices), 960
    cost = rng.lognormal(0, 1, samples)
    cpu, device = 4e-3 * cost, 0.5e-3 + 0.5e-3 * cost
    work = Work(cpu, cpu, 16, (500, 460), 6, device, device, devices)
    policy = m.Policy(window=16 * 4 * devices, fixed=lateness == 0, max_lateness=lateness, devices=devices)
    loader = VirtualLoader(work, replace(policy, threshold=threshold))
    outcome = loader.run()
    assert sorted(outcome.serials) == list(range(samples))
    made = Counter(loader._made_on.values())
    assert sum(made.values()) == loader.device_samples > 100
    assert min(made.values()) > 0.6 * max(made.values())
    assert (loader.crossed == 0) == (lateness == 0)
