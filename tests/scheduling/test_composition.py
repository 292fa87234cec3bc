"""When a batch may overtake an older sample and when not, that a chunk has one epoch, that a run can be repeated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minato_gpu.lab.simulation.scenarios import SCENARIOS
from minato_gpu.lab.simulation.virtual_loader import VirtualLoader
from minato_gpu.samples import SourceBatch, TicketId
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.composition import FixedComposition, FreeComposition, ItemComposition
from minato_gpu.scheduling.messages import Admitted, Compose
from minato_gpu.scheduling.places import Place, Places
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.scheduler import Scheduler
from tests.support.tickets import span

SIZE = 2


class Composer:
    """Places of two samples each, of the epochs given."""

    def __init__(self, fixed: bool, epochs: list[int], lateness: int = 3) -> None:
        self.places = Places()
        made = FixedComposition(self.places, lateness) if fixed else FreeComposition(self.places, lateness)
        self.composition: FixedComposition | FreeComposition = made
        for number, epoch in enumerate(epochs):
            place = Place(Admitted(0.0, SourceBatch(number), epoch, TicketId(SIZE * number), SIZE))
            self.composition.admit(place, SIZE)
            self.places.admit(place)

    def finish(self, place: int) -> None:
        """All samples of the place are ready."""
        whole = span(SIZE * place, SIZE * place + SIZE)
        epoch = self.places.at(whole[0]).epoch
        self.composition.finished(epoch, whole, (), self.places.finish(whole))

    def composed(self, *, eager: bool) -> tuple[tuple[int, int], ...] | None:
        """The samples of the next batch, if it is composed."""
        batch = self.composition.compose(eager)
        return None if batch is None else batch.spans


@pytest.mark.parametrize("fixed", [True, False])
def test_a_batch_overtakes_only_for_a_consumer_that_needs_one(fixed: bool) -> None:
    """Until then the older samples may still become ready."""
    composer = Composer(fixed, [0, 0, 0])
    composer.finish(1)
    assert composer.composed(eager=False) is None
    assert composer.composed(eager=True) == ((2, 4),)
    composer.finish(0)
    assert composer.composed(eager=False) == ((0, 2),)


@pytest.mark.parametrize("fixed", [True, False])
def test_a_batch_overtakes_no_more_than_lateness_allows(fixed: bool) -> None:
    composer = Composer(fixed, [0] * 5, lateness=2)
    for place in range(1, 5):
        composer.finish(place)
    assert [composer.composed(eager=True) for _ in range(3)] == [((2, 4),), ((4, 6),), None]
    assert composer.composition.held_back
    composer.finish(0)
    assert composer.composed(eager=True) == ((0, 2),)


@pytest.mark.parametrize("fixed", [True, False])
def test_no_batch_overtakes_the_end_of_an_epoch(fixed: bool) -> None:
    composer = Composer(fixed, [0, 1])
    composer.finish(1)
    assert composer.composed(eager=True) is None
    composer.finish(0)
    assert [composer.composed(eager=True) for _ in range(2)] == [((0, 2),), ((2, 4),)]


EPOCH = 4


def chunks_of_two_epochs(lane: str) -> list[m.Chunk]:
    """Two epochs of one batch each, admitted while the lane is closed, then as many chunks as it takes."""
    scheduler = Scheduler(Policy(window=4 * EPOCH))
    device = [1e-5] * EPOCH if lane != m.CPU else None
    for epoch in range(2):
        cpu = [1e-5 if device is None else 10.0] * EPOCH
        scheduler.handle(m.Admitted(0.0, SourceBatch(epoch), epoch, TicketId(epoch * EPOCH), EPOCH, cpu, device))
    chunks: list[m.Chunk] = []
    instructions = scheduler.handle(m.LaneOpened(0.0, lane, 1, m.CPU if lane == m.CPU else m.DEVICE))
    time = 0.0
    while instructions:
        sent = [each.chunk for each in instructions if isinstance(each, m.Dispatch)]
        chunks += sent
        instructions = []
        for chunk in sent:
            time += 1e-3
            instructions += scheduler.handle(m.Finished(time, chunk.number, chunk.size, 1e-4))
    return chunks


@pytest.mark.parametrize("lane", [m.CPU, "device"])
def test_no_chunk_spans_two_epochs(lane: str) -> None:
    chunks = chunks_of_two_epochs(lane)
    serials = [serial for chunk in chunks for lo, hi in chunk.spans for serial in range(lo, hi)]
    assert sorted(serials) == list(range(2 * EPOCH))
    assert all(len({serial // EPOCH for lo, hi in chunk.spans for serial in range(lo, hi)}) == 1 for chunk in chunks)
    assert any(chunk.size > 1 for chunk in chunks)


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
