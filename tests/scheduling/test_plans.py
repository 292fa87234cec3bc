"""The plans worth having: for every price of device time the steps lead to the cheapest one."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minato_gpu.samples import TicketId
from minato_gpu.scheduling.plans import END, WHOLE, Plan, hull, rest
from tests.support.tickets import entry_of

COST = st.floats(1e-3, 10.0)
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
    entry.suit(patience=inf)
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
    assert (left.lo, left.hi, left.at, left.read, left.cpu, left.device) == (4, 5, 1, True, 5.0, 4.0)


def test_what_it_took_to_lay_a_sample_down_is_no_part_of_what_was_done() -> None:
    between = [Plan(1, 1.0, 4.0, 0.25), Plan(2, 3.0, 0.5, 0.5)]
    assert rest(6.0, between, 1) == (5.25, 4.0, (Plan(2, 2.25, 0.5, 0.5),))
