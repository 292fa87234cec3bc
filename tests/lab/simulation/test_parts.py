"""What a simulation is made of: lower bounds, costs; worked out by hand, or as published."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from minato_gpu.lab.simulation.bounds import held_bound, lp_bound, threshold_limit
from minato_gpu.lab.simulation.scenarios import SCENARIOS, Costs
from minato_gpu.lab.simulation.work import Cut, Work


def test_bounds_of_cases_that_can_be_worked_out() -> None:
    cpu = np.array([1.0, 1.0, 6.0, 1.0])
    work = Work(cpu, cpu, 2, (4,), 3)
    assert lp_bound(work) == 6.0
    assert held_bound(work, 4, 0, 0.0) == 6.0
    assert held_bound(work, 2, 0, 0.0) == 7.0  # the slow one is admitted when the first batch has gone
    assert held_bound(work, 4, 0, 5.5) == pytest.approx(6.5 + 5.5)
    late = Work(np.ones(4), np.ones(4), 2, (4,), 2, stagger_s=1.0)
    assert lp_bound(late) == pytest.approx(2.5)  # slots from 0.0 and 1.0: four seconds of work are done by 2.5
    both = Work(np.array([8.0, 2.0]), np.ones(2), 1, (2,), 1, np.array([1.0, 1.0]), np.ones(2), 1)
    assert lp_bound(both) == pytest.approx(4 / 3)  # a third of the second sample goes to the device, after the first


@pytest.mark.parametrize("seed", range(5))
def test_the_bound_is_the_linear_program_over_all_plans(seed: int) -> None:
    optimize = pytest.importorskip("scipy.optimize")
    rng = np.random.default_rng(seed)
    n, slots, devices = 20, 3, 2
    first, second = rng.lognormal(size=(2, n))
    on_device = rng.lognormal(size=(2, n)) / 4
    moved = rng.lognormal(size=n) / 20
    cut = Cut(1, first, on_device[1] + moved, first, on_device[1] + moved)
    device = on_device.sum(axis=0)
    work = Work(first + second, first + second, 5, (n,), slots, device, device, devices, cuts=(cut,))
    cpu_of, device_of = np.array([first + second, first, 0 * first]), np.array([0 * device, cut.device, device])
    solved = optimize.linprog(
        [0.0] * (3 * n) + [1.0],
        A_ub=[[*(cpu_of.ravel() / slots), -1.0], [*(device_of.ravel() / devices), -1.0]],
        b_ub=[0.0, 0.0],
        A_eq=[[float(at % n == serial) for at in range(3 * n)] + [0.0] for serial in range(n)],
        b_eq=[1.0] * n,
        bounds=[(0, 1)] * (3 * n) + [(0, None)],
    )
    alone = float((cpu_of + device_of).min(axis=0).max())
    assert lp_bound(work) == pytest.approx(max(solved.fun, alone))
    assert threshold_limit(work) >= lp_bound(work)


# --- costs that scenarios draw ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("costs_of", "quantiles", "mean", "std"),
    [
        (SCENARIOS["object-detection"].costs, (11, 28, 30, 35, 176), 31, 19),
        (SCENARIOS["segmentation"].costs, (10, 470, 630, 750, 2230), 500, 197),
    ],
)
def test_costs_follow_the_published_table(
    costs_of: Costs, quantiles: tuple[float, float, float, float, float], mean: float, std: float
) -> None:
    costs, device = costs_of(np.random.default_rng(0), 100_000)
    assert device is None
    assert np.percentile(costs, [50, 75, 90, 100]) * 1e3 == pytest.approx(quantiles[1:], rel=0.02)
    assert quantiles[0] <= costs.min() * 1e3 <= quantiles[0] + 0.05 * mean
    assert costs.mean() * 1e3 == pytest.approx(mean, rel=0.02)
    assert costs.std() * 1e3 == pytest.approx(std, rel=0.06)


def test_no_prediction_knows_of_a_surprise() -> None:
    scenario = SCENARIOS["surprise-cut"]
    work, calm = (one.work(4, 0.3) for one in (scenario, replace(scenario, surprise=(0.0, 1.0, 1.0))))
    assert np.array_equal(work.predicted_cpu, calm.predicted_cpu)
    assert np.array_equal(work.plans(7), calm.plans(7))
    slow = work.cpu > 1.5 * calm.cpu
    assert 0.005 < slow.mean() < 0.02
    for one, other in ((work.cpu, calm.cpu), (work.cuts[0].cpu, calm.cuts[0].cpu)):
        assert np.allclose(one[slow], 30 * other[slow]) and np.array_equal(one[~slow], other[~slow])
