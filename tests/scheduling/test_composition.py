"""Samples that are delivered one by one, and the same instructions for the same events. What batches consist of, and
when they overtake, is in ``model.py``."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minato_gpu.lab.simulation.scenarios import SCENARIOS
from minato_gpu.lab.simulation.virtual_loader import VirtualLoader
from minato_gpu.samples import SourceBatch, TicketId
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.composition import ItemComposition
from minato_gpu.scheduling.messages import Admitted, Compose
from minato_gpu.scheduling.places import Place, Places
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.scheduler import Scheduler
from tests.support.tickets import span


@pytest.mark.parametrize("fixed", [True, False])
def test_the_same_events_lead_to_the_same_instructions(fixed: bool) -> None:
    work = replace(SCENARIOS["hybrid"], epoch_samples=(200,)).work(0, 0.3)
    policy = Policy(window=256, fixed=fixed, max_lateness=0 if fixed else 8, budget_bytes=200_000)
    loader = VirtualLoader(work, policy)
    events: list[m.Event] = []
    said: list[list[m.Instruction]] = []
    handle = loader.scheduler.handle

    def record(event: m.Event) -> list[m.Instruction]:
        events.append(event)
        said.append(handle(event))
        return said[-1]

    loader.scheduler.handle = record  # type: ignore[method-assign]
    loader.run()
    again = Scheduler(policy)
    assert [again.handle(event) for event in events] == said


def test_samples_that_are_delivered_one_by_one_are_composed_as_they_come() -> None:
    """In runs that begin at their first sample's order, within one place; what has failed is one by itself."""
    places = Places()
    composition = ItemComposition(places)
    first, shift = 10, 3  # an earlier run has delivered the others
    for lo, hi in [(10, 16), (16, 17), (17, 20)]:
        place = Place(Admitted(0.0, SourceBatch(lo + shift), 0, TicketId(lo), hi - lo))
        composition.admit(place, hi - lo)
        places.admit(place)
    runs: list[Compose] = []
    for lo, hi, failed in [(18, 20, ()), (first, 12, ()), (12, 18, (13, 14))]:
        bad = tuple(map(TicketId, failed))
        composition.finished(0, span(lo, hi), bad, places.finish(span(lo, hi), bad))
        while (run := composition.compose(False)) is not None:
            runs.append(run)
    assert all(run.order == run.spans[0][0] + shift for run in runs)
    assert sorted((*run.spans[0], run.failed) for run in runs) == [
        (10, 12, ()),
        (12, 13, ()),
        (13, 14, (13,)),
        (14, 15, (14,)),
        (15, 16, ()),
        (16, 17, ()),
        (17, 18, ()),
        (18, 20, ()),
    ]
