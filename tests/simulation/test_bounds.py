"""The lower bounds: worked out by hand, and against the linear programs that they solve."""

from __future__ import annotations

import numpy as np
import pytest

from minato_gpu.simulation.bounds import held_bound, lp_bound, threshold_limit
from minato_gpu.simulation.work import Cut, Work


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
def test_the_bound_is_the_linear_program(seed: int) -> None:
    optimize = pytest.importorskip("scipy.optimize")
    rng = np.random.default_rng(seed)
    n, slots, devices = 30, 3, 2
    cpu, device = rng.lognormal(size=n), rng.lognormal(size=n) / 4
    work = Work(cpu, cpu, 5, (n,), slots, device, device, devices)
    solved = optimize.linprog(
        [0.0] * n + [1.0],
        A_ub=[[*(-device / devices), -1.0], [*(cpu / slots), -1.0]],
        b_ub=[-device.sum() / devices, 0.0],
        bounds=[(0, 1)] * n + [(0, None)],
    )
    assert lp_bound(work) == pytest.approx(max(solved.fun, float(np.minimum(cpu, device).max())))
    assert threshold_limit(work) >= lp_bound(work)


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
