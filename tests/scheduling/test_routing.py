"""The threshold against all possible cuts, the plans worth having, and who of those that wait starts first."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minato_gpu.samples import TicketId
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.lane_state import LaneState
from minato_gpu.scheduling.messages import CPU
from minato_gpu.scheduling.plans import END, WHOLE, Plan, hull, rest
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.routing import Router, threshold
from minato_gpu.scheduling.waiting import DEVICE, Entry, Waiting
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
    assert [router.prefers_device(entry_of(0, 1, 0, cpu, 1.0)) for cpu in (1.9, 2.0, 5.0)] == [False, True, True]
    lanes[m.DEVICE].slots = 0
    assert not router.prefers_device(entry_of(0, 1, 0, 5.0, 1.0))


BETWEEN = st.lists(st.tuples(COST, COST), max_size=5).map(
    lambda pairs: [Plan(split, *pair) for split, pair in enumerate(pairs, start=1)]
)


@given(COST, st.none() | COST, BETWEEN, st.floats(1e-3, 1e3))
def test_at_every_price_the_steps_lead_to_the_cheapest_plan(
    cpu: float, device: float | None, between: list[Plan], price: float
) -> None:
    steps = hull(cpu, device, between)
    assert [step.ratio for step in steps] == sorted((step.ratio for step in steps), reverse=True)
    chosen = before = Plan(END, cpu, 0.0)
    for step in steps:
        assert step.cpu == pytest.approx(before.cpu - step.plan.cpu) and step.cpu > 0
        before = step.plan
        if step.ratio >= price:
            chosen = step.plan
    plans = [Plan(END, cpu, 0.0), *between, *([] if device is None else [Plan(WHOLE, 0.0, device)])]
    best = min(plan.cpu + price * plan.device for plan in plans)
    assert chosen.cpu + price * chosen.device == pytest.approx(best)


def test_a_sample_with_two_plans_has_the_one_ratio_it_always_had() -> None:
    (step,) = hull(6.0, 2.0, ())
    assert step == (3.0, 6.0, 2.0, Plan(WHOLE, 0.0, 2.0))


def test_what_is_worse_in_both_or_worse_than_a_mixture_is_left_out() -> None:
    dominated, mixed = Plan(1, 5.0, 3.0), Plan(2, 3.0, 1.9)
    assert [step.plan.split for step in hull(6.0, 2.0, [dominated])] == [WHOLE]
    assert [step.plan.split for step in hull(6.0, 2.0, [mixed])] == [WHOLE]
    assert [step.plan.split for step in hull(6.0, 2.0, [Plan(2, 3.0, 0.5)])] == [2, WHOLE]
    assert [step.plan.split for step in hull(6.0, None, [Plan(2, 3.0, 0.5)])] == [2]


def test_an_entry_is_cut_where_the_threshold_says() -> None:
    entry = entry_of(0, 1, 0, 6.0, 2.0)
    entry.set_plans([Plan(2, 3.0, 0.5)])
    entry.update_ratio(patience=inf)
    assert entry.ratio == 2.0  # of the last step: from there on everything is the device's
    assert [plan and plan.split for plan in map(entry.cut, (inf, 7.0, 6.0, 3.0))] == [None, None, 2, 2]


def test_what_is_left_of_a_sample_costs_what_is_left() -> None:
    between = [Plan(1, 1.0, 4.0), Plan(2, 3.0, 0.5)]
    assert rest(6.0, between, 1) == (5.0, 4.0, (Plan(2, 2.0, 0.5),))
    assert rest(6.0, between, 2) == (3.0, 0.5, ())
    assert rest(6.0, (), 2) == (6.0, None, ())
    entry = entry_of(3, 5, 0, 6.0, 7.0)
    entry.between = between
    left = entry.rest(TicketId(4), 1)
    assert (left.lo, left.hi, left.stage, left.read, left.cpu, left.device) == (4, 5, 1, True, 5.0, 4.0)


def test_what_it_took_to_lay_a_sample_down_is_no_part_of_what_was_done() -> None:
    between = [Plan(1, 1.0, 4.0, 0.25), Plan(2, 3.0, 0.5, 0.5)]
    assert rest(6.0, between, 1) == (5.25, 4.0, (Plan(2, 2.25, 0.5, 0.5),))


def entry(
    lo: int, cpu: float | None = None, device: float | None = None, *, slow: bool = False, early: float = 0
) -> Entry:
    made = entry_of(lo, lo + 1, lo, cpu, device)
    made.slow = slow
    made.priority -= early
    return made


def test_the_oldest_starts_first_unless_another_asks_for_a_head_start() -> None:
    waiting = Waiting()
    for each in (entry(5), entry(2), entry(9, early=8)):
        waiting.add(each)
    order = []
    while (first := waiting.first(CPU)) is not None:
        waiting.take(first, 1)
        order.append(first.lo)
    assert order == [9, 2, 5]


@pytest.mark.parametrize(("patience", "expected"), [(0.0, 9), (6.9, 9), (8.0, 2), (float("inf"), 2)])
def test_slow_tickets_start_as_much_later_as_patience_says(patience: float, expected: int) -> None:
    waiting = Waiting()
    waiting.add(entry(2))
    waiting.add(entry(9, slow=True, early=14))
    first = waiting.first(CPU, patience)
    assert first is not None
    assert first.lo == expected


def test_a_run_is_taken_piece_by_piece_and_keeps_its_place() -> None:
    waiting = Waiting()
    waiting.add(entry_of(0, 10, 0, 1e-6))
    run = waiting.first(CPU)
    assert run is not None
    waiting.take(run, 4)
    rest = waiting.first(CPU)
    assert rest is not None
    assert (rest.lo, rest.hi, rest.place.first, rest.cpu) == (4, 10, 0, 1e-6)
    assert rest.place.waiting == 6
    assert waiting.seconds(CPU) == pytest.approx(6e-6)


def test_move_puts_every_ticket_on_the_side_of_its_ratio() -> None:
    waiting = Waiting()
    for lo, ratio in enumerate([1.0, 8.0, 3.0, 5.0, 2.0]):
        waiting.add(entry(lo, ratio, 1.0))
    ranked: list[int] = []
    waiting.move(3.0, lambda moved: ranked.append(moved.lo))
    assert sorted(ranked) == [1, 2, 3]
    nearest = waiting.nearest(DEVICE)
    assert nearest is not None
    assert nearest.lo == 2
    assert waiting.seconds(DEVICE) == pytest.approx(3.0)
    waiting.move(float("inf"), lambda moved: None)
    assert waiting.nearest(DEVICE) is None
    assert [near.lo for near in waiting.near(CPU)] == [1, 3, 2, 4, 0]


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.1, 10)), min_size=1, max_size=300))
def test_the_heaps_hold_no_more_than_a_few_times_what_waits(steps: list[tuple[int, float]]) -> None:
    waiting, lo = Waiting(), 0
    for action, ratio in steps:
        if action == 0 and (first := waiting.first(CPU)) is not None:
            waiting.take(first, 1)
        elif action == 1:
            waiting.move(ratio, lambda moved: None)
        else:
            waiting.add(entry(lo, ratio, 1.0))
            lo += 1
        heaps = [heap for kind in (waiting._fast, waiting._slow, waiting._near) for heap in kind.values()]
        assert max(len(heap) for heap in heaps) <= 65 + 4 * (len(waiting) + 1)
        oldest = waiting.oldest()
        assert (oldest is None) == (len(waiting) == 0)


def test_each_home_has_a_side_of_its_own_and_one_that_is_closed_sends_all_to_the_cpu() -> None:
    waiting = Waiting(("device:0", "device:1"))
    entries = [entry_of(n, n + 1, n, 2.0 + n, 1.0, f"device:{n % 2}") for n in range(4)]
    for entry in entries:
        waiting.add(entry)
    waiting.move(3.5, lambda entry: None)
    assert [entry.side for entry in entries] == ["cpu", "cpu", "device:0", "device:1"]
    assert [waiting.nearest("cpu", home) for home in waiting.homes] == entries[:2]
    assert [waiting.first(home) for home in waiting.homes] == entries[2:]
    waiting.move(0.0, lambda entry: None, closed=["device:1"])
    assert [entry.side for entry in entries] == ["device:0", "cpu", "device:0", "cpu"]
    assert waiting.seconds("device:1") == 0.0 and waiting.seconds("cpu") == pytest.approx(3.0 + 5.0)
