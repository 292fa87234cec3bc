"""The threshold against all possible cuts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.lane_state import LaneState
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.routing import Router, threshold
from minato_gpu.scheduling.waiting import Waiting
from tests.support.tickets import entry_of

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


def test_what_the_device_is_so_much_faster_at_goes_there_while_it_is_open() -> None:
    policy = Policy(window=64)
    lanes = {name: LaneState(name, name, policy) for name in (m.CPU, m.DEVICE)}
    router = Router(policy, lanes, Waiting(policy.homes))
    router.threshold, lanes[m.DEVICE].slots = 2.0, 1
    assert [router.beyond(entry_of(0, 1, 0, cpu, 1.0)) for cpu in (1.9, 2.0, 5.0)] == [False, True, True]
    lanes[m.DEVICE].slots = 0
    assert not router.beyond(entry_of(0, 1, 0, 5.0, 1.0))
