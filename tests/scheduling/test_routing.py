"""The threshold against all possible cuts, the plans worth having, who of those that wait starts first, and samples
that change lanes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minato_gpu.samples import TicketId
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.lane_state import LaneState
from minato_gpu.scheduling.ledger import Ledger
from minato_gpu.scheduling.messages import CPU
from minato_gpu.scheduling.plans import END, WHOLE, Plan, hull, rest
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.routing import Router, threshold
from minato_gpu.scheduling.waiting import Entry, Waiting
from tests.scheduling.model import CUTS, SAMPLE_BYTES, Shell
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


def test_what_is_left_of_a_sample_costs_what_is_left() -> None:
    """What it took to lay the sample down is no part of what was done."""
    between = [Plan(1, 1.0, 4.0, 0.25), Plan(2, 3.0, 0.5, 0.5)]
    assert rest(6.0, between, 1) == (5.25, 4.0, (Plan(2, 2.25, 0.5, 0.5),))
    assert rest(6.0, between, 2) == (3.5, 0.5, ())
    assert rest(6.0, (), 2) == (6.0, None, ())
    entry = entry_of(3, 5, 0, 6.0, 7.0)
    entry.between = between
    left = entry.rest(TicketId(4), 1)
    assert (left.lo, left.hi, left.stage, left.read, left.cpu, left.device) == (4, 5, 1, True, 5.25, 4.0)


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
    assert waiting.seconds["device:1"] == 0.0 and waiting.seconds["cpu"] == pytest.approx(3.0 + 5.0)


def opened(policy: Policy, cpu: int) -> Shell:
    """So many slots of the CPU, and one device."""
    shell = Shell(policy)
    shell.open(m.CPU, cpu)
    shell.open("device", 1)
    return shell


def on(shell: Shell, lane: str) -> list[int]:
    """The chunks that the lane holds, oldest first."""
    return [number for number, chunk in sorted(shell.held.items()) if chunk.lane == lane]


def test_what_is_to_be_handed_over_counts_with_what_it_leaves_there() -> None:
    """P4: a device that is behind must not let the CPU pile up intermediate values beyond the budget."""
    budget, slots = 8 * SAMPLE_BYTES, 2
    shell = opened(Policy(window=256, budget_bytes=budget, micro_batch=1), slots)
    for _ in range(64):
        shell.admit(4, 0, [1.0] * 4, [1.0] * 4, [(Plan(CUTS[0], 1e-3, 1e-3),)] * 4)
    peak = 0
    while len(delivered := shell.delivered_serials()) < 256:
        number = next(iter(on(shell, m.CPU)), None)  # the CPU is always the faster one
        number = on(shell, "device")[0] if number is None else number
        shell.finish(number, shell.held[number].size)
        peak = max(peak, SAMPLE_BYTES * (len(shell.ready) + shell.waiting_on() - len(delivered)))
        while shell.ask():
            pass
    assert shell.stage and peak <= budget + (slots + 1) * SAMPLE_BYTES


def test_until_it_is_known_what_a_hand_over_leaves_no_more_than_the_slots_go_there() -> None:
    ledger = Ledger(1_000_000)
    ledger.start(1)
    ledger.ready(1, 10)
    assert ledger.fits(50, 2) == 50
    assert ledger.fits(50, 2, handing=True) == 2
    ledger.start(1, handing=True)
    assert ledger.fits(50, 2, handing=True) == 1
    ledger.handed(1, 100_000, handing=True)
    assert ledger.fits(50, 2, handing=True) == 8, "nine at 100,010 bytes, of which one lies there already"
    ledger.start(4, handing=True)
    assert ledger.in_flight == 10 + 100_000 + 4 * 100_010
    ledger.stop(4, handing=True)
    assert (ledger.running, ledger.handing) == (0, 0)


def test_tickets_of_a_device_that_is_gone_start_when_they_would_have_on_the_cpu() -> None:
    """In strict order the consumer waits for them, while the CPU prepares what comes after."""
    shell = opened(Policy(window=64, ahead_s=0.0, micro_batch=8), 1)
    for _ in range(4):
        shell.admit(16, 0, [10e-3] * 16, [1e-3, 9e-3] * 8)
    sent = on(shell, "device")
    given = {serial for number in sent for lo, hi in shell.held[number].spans for serial in range(lo, hi)}
    assert given
    shell.open("device", -1)
    for number in sent:
        shell.give_back(number)
    while len(shell.ready) < 32:
        first = on(shell, m.CPU)[0]
        shell.finish(first, shell.held[first].size)
    assert given <= shell.ready, "they are among the oldest"


def test_a_look_at_a_chunk_that_has_nothing_left_to_do_is_harmless() -> None:
    """All its samples are reported, and the worker has not said yet that it is through."""
    shell = Shell(Policy(window=64, ahead_s=0.0))
    shell.open(m.CPU, 2)
    shell.admit(16, 0, [2e-4] * 16)
    chunk = shell.held[on(shell, m.CPU)[0]]
    shell.tell(m.Finished(0.03, chunk.number, chunk.size, 0.01, 100, False))
    shell.tell(m.Running(0.05, chunk.number, chunk.size, 0.04))
    shell.tell(m.Tick(0.05))
    assert (shell.scheduler.wake_at() or 1.0) > 0.05


def test_a_slow_sample_is_asked_for_where_a_device_has_a_plan_that_is_sooner_through() -> None:
    router = opened(Policy(window=64, ahead_s=0.0), 1).scheduler._intake.router
    entry = entry_of(0, 1, 0, 8e-3, 1.0)
    entry.between = (Plan(2, 2e-3, 5e-3), Plan(3, 4e-3, 2e-3, 4e-3), Plan(4, 6e-3, 1e-3))
    assert router.rescues(entry, 10.0, 0.080) == (2, 3, 4)
    assert router.rescues(entry, 10.0, 0.022) == (4,), "laying down what 3 leaves takes too long"
    entry.stage = 3
    assert router.rescues(entry, 10.0, 0.080) == (4,)
    entry.stage = 4
    assert not router.may_rescue(entry) and router.rescues(entry, 10.0, 0.080) == ()


def test_what_the_device_is_so_much_faster_at_goes_there_while_it_is_open() -> None:
    policy = Policy(window=64)
    lanes = {name: LaneState(name, name, policy) for name in (m.CPU, m.DEVICE)}
    router = Router(policy, lanes, Waiting(policy.homes))
    router.threshold, lanes[m.DEVICE].slots = 2.0, 1
    assert [router.prefers_device(entry_of(0, 1, 0, cpu, 1.0)) for cpu in (1.9, 2.0, 5.0)] == [False, True, True]
    lanes[m.DEVICE].slots = 0
    assert not router.prefers_device(entry_of(0, 1, 0, 5.0, 1.0))
