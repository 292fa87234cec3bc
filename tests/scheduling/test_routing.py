"""The threshold against all possible cuts, and against the linear program itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minato_gpu.scheduling.bounds import lp_bound, threshold_limit
from minato_gpu.scheduling.routing import threshold
from minato_gpu.scheduling.work import Work

COST = st.floats(1e-3, 10.0)


@given(
    st.lists(st.tuples(COST, COST), min_size=1, max_size=12),
    st.integers(1, 8),
    st.integers(1, 4),
    st.floats(0, 5),
    st.floats(0, 5),
)
def test_no_cut_is_better_by_more_than_one_sample(
    costs: list[tuple[float, float]], slots: int, devices: int, cpu_backlog: float, device_backlog: float
) -> None:
    cpu, device = np.array(costs).T
    ratio, drain = threshold(cpu, device, slots, devices, cpu_backlog, device_backlog)

    def time(on_device: np.ndarray) -> float:
        on_cpu = (cpu_backlog + cpu[~on_device].sum()) / slots
        return float(max(on_cpu, (device_backlog + device[on_device].sum()) / devices))

    # Samples of equal ratio may stand on either side of the threshold: a cut is a prefix in the order of the ratio.
    ratios = cpu / device
    rank = np.argsort(np.argsort(-ratios, kind="stable"))
    best = min(time(rank < taken) for taken in range(len(cpu) + 1))
    one = float(max(cpu.max() / slots, device.max() / devices))
    assert best - 1e-9 <= drain + one
    assert drain <= best + one + 1e-9
    if len(set(ratios.tolist())) == len(ratios):
        assert time(ratios >= ratio) == pytest.approx(drain)


def test_without_one_kind_of_lane_the_other_takes_all() -> None:
    assert threshold([1.0], [1.0], 4, 0)[0] == float("inf")
    assert threshold([1.0], [1.0], 0, 4)[0] == 0.0
    assert threshold([], [], 4, 4) == (float("inf"), 0.0)


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
