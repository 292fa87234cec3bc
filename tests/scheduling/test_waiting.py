"""Waiting tickets: who starts first, who is nearest to the threshold, and that heaps never outgrow the window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minato_gpu.scheduling.messages import CPU
from minato_gpu.scheduling.waiting import DEVICE, Entry, Waiting
from tests.support.tickets import entry_of


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
