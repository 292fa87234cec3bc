"""When slow samples start, and what may start before the oldest."""

from __future__ import annotations

import pytest

from minato_gpu.samples import SourceBatch, TicketId
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.pacing import EARLY_SLOTS, Pace
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.scheduler import Scheduler

SIZE, SLOTS = 8, 4
CHEAP_S, SLOW_S = 0.02, 3.0


def _pace(slots: int, **more: bool) -> Pace:
    pace = Pace(Policy(window=64, **more))
    pace.slots = pace.cpu_slots = slots
    pace.expect(0.1, None, 64)
    pace.measure()
    return pace


def test_a_sample_starts_as_many_places_early_as_others_are_prepared_meanwhile() -> None:
    pace = _pace(EARLY_SLOTS)
    assert pace.tau == pytest.approx(0.1 / EARLY_SLOTS)
    assert pace.priority(100, 20 * pace.tau, cold=False) == pytest.approx(80)


@pytest.mark.parametrize("pace", [_pace(EARLY_SLOTS - 1), _pace(EARLY_SLOTS, early=False)], ids=["few slots", "asked"])
def test_or_in_its_turn(pace: Pace) -> None:
    assert pace.priority(100, 20 * pace.tau, cold=False) == 100


def _first(budget: int | None) -> list[int]:
    """The first serial that each slot takes: the last sample of the second batch is slow."""
    scheduler = Scheduler(Policy(window=4 * SIZE, budget_bytes=budget))
    costs = [CHEAP_S] * SIZE
    for place in range(4):
        slow = costs if place != 1 else [*costs[1:], SLOW_S]
        scheduler.handle(m.Admitted(0.0, SourceBatch(place), 0, TicketId(place * SIZE), SIZE, slow))
    said = scheduler.handle(m.LaneOpened(0.0, m.CPU, SLOTS))
    return [each.chunk.spans[0][0] for each in said if isinstance(each, m.Dispatch)]


def test_a_slow_sample_starts_first() -> None:
    assert _first(None)[0] == 2 * SIZE - 1


def test_memory_is_set_aside_for_the_oldest_batch_first() -> None:
    """While sizes are unknown there is room for one sample in each slot, and the oldest batch needs all of it."""
    assert max(_first(1 << 20)) < SIZE


def test_samples_that_are_taken_back_go_to_another_slot() -> None:
    scheduler = Scheduler(Policy(window=64))
    scheduler.handle(m.Admitted(0.0, SourceBatch(0), 0, TicketId(0), SIZE, [1e-4] * SIZE))
    said = scheduler.handle(m.LaneOpened(0.0, m.CPU, 1))
    (chunk,) = [each.chunk for each in said if isinstance(each, m.Dispatch)]
    assert chunk.spans == ((0, SIZE),)
    said = scheduler.handle(m.LaneOpened(0.0, m.CPU, 1))
    assert not said, "all is at the first slot"
    said = scheduler.handle(m.Running(1.0, chunk.number, 2, 1.0))
    assert said == [m.Revoke(m.CPU, chunk.number, 3)]
    said = scheduler.handle(m.Revoked(1.0, chunk.number, 3))
    sent = [span for each in said if isinstance(each, m.Dispatch) for span in each.chunk.spans]
    assert min(sent)[0] == 3 and sum(hi - lo for lo, hi in sent) == SIZE - 3
