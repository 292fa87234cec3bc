"""From ready samples to batches: slabs handed over whole, gathered, or left to a job; and every block freed once. And
costs of parts and rests: guessed until they are learned."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import default_collate

from minato_gpu.estimates.cuts import CutEstimator, part_names
from minato_gpu.estimates.estimator import Observed
from minato_gpu.lanes.base import Extra, Failure, Part
from minato_gpu.lanes.contract import Offers
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory.layout import Layout
from minato_gpu.pipeline.pipeline import CupyFunction, Field, Pipeline, Stage
from minato_gpu.samples import OutputBatch, TicketId
from minato_gpu.scheduling.costs import CostModel
from minato_gpu.scheduling.messages import Compose
from minato_gpu.scheduling.plans import Plan
from minato_gpu.window.assembly import Assembly
from minato_gpu.window.records import Record
from tests.lanes.harness import open_links
from tests.support.same import same
from tests.support.tickets import positions, span, spans


def sample(serial: int) -> Any:
    """Sample of a serial: an array and a text."""
    return {"x": np.full(4, serial, np.float32), "name": f"n{serial}"}


def failure(text: str = "broken") -> Failure:
    """What a worker sends for a sample that raised."""
    try:
        raise ValueError(text)
    except ValueError:
        return Failure(ExceptionWrapper(where="in a test"))


class Floor:
    """An assembly with one worker that does what the test says; places of four samples."""

    def __init__(self, links: WorkerChannels, places: int = 3) -> None:
        self.links = links
        self.leases = links.loans
        self.assembly = Assembly(links, stacks=True, joins_whole=True)
        self.worker = Store(0, links, links.arenas[0])
        for place in range(places):
            keys = [f"k{serial}" for serial in range(4 * place, 4 * place + 4)]
            self.assembly.admit(Record(0, TicketId(4 * place), positions(4 * place, 4 * place + 4), keys, None))

    def learn(self) -> None:
        """The first sample has been described."""
        self.assembly.samples.learn(pickle.dumps(Layout.of(sample(0))))

    def prepare(self, lo: int, hi: int, *, bad: int = -1, odd: int = -1) -> None:
        """What a worker does with these serials, and its report."""
        items: list[Any] = []
        for piece in self.assembly.pieces([span(lo, hi)], inspect=False):
            for at in range(len(piece.keys)):
                serial = piece.position + at
                if serial == bad:
                    items.append(failure(f"broken {serial}"))
                elif piece.slab >= 0 and self.assembly.samples.layout_bytes and serial != odd:
                    views = self.worker.views(piece.slab, piece.rows, self.assembly.samples.layout_bytes)
                    layout = self.worker.layout(self.assembly.samples.layout_bytes)
                    items.append(Extra(layout.write(views, piece.row + at, sample(serial)) or []))
                else:
                    value = {**sample(serial), "x": np.zeros(9)} if serial == odd else sample(serial)
                    items.append(self.worker.put(value))
        self.assembly.samples.arrived([span(lo, hi)], items)

    def batch(self, order: int, *parts: tuple[int, int]) -> Any:
        """Compose a batch that needs no job, and take its value."""
        assert not self.assembly.compose(Compose(OutputBatch(order), spans(*parts)))
        assert self.assembly.ready(OutputBatch(order))
        return self.assembly.value(self.assembly.take(OutputBatch(order)))

    def joined(self, order: int, value: Any) -> None:
        """A worker has joined a batch of four."""
        self.assembly.joined(OutputBatch(order), [self.worker.put(value, collated=True), None, None, None])

    def settle(self) -> tuple[int, int]:
        """Bytes in use in the engine's and the worker's arena once everything that came back is free."""
        self.assembly.holdings.reclaim()
        for offset in self.links.board.returned(0):
            self.links.arenas[0].free(offset)
        return self.links.engine_arena.allocated, self.links.arenas[0].allocated


@pytest.fixture
def links() -> Iterator[WorkerChannels]:
    with open_links(1) as links:
        yield links


def expected(*serials: int) -> Any:
    """What default_collate makes of these samples."""
    return default_collate([sample(serial) for serial in serials])


def test_a_place_as_the_sampler_made_it_is_its_slab(links: WorkerChannels) -> None:
    """Handed over without a copy, while later places are filled."""
    floor = Floor(links)
    floor.learn()
    floor.prepare(0, 12)
    slab = floor.assembly.window.at(TicketId(0)).slab
    batch = floor.batch(0, (0, 4))
    assert same(batch, expected(0, 1, 2, 3))
    whole = np.frombuffer(links.engine_arena.buffer, np.uint8)
    assert batch["x"].data_ptr() - whole.ctypes.data == slab
    del batch
    assert same(floor.batch(1, (4, 8)), expected(4, 5, 6, 7))
    assert same(floor.batch(2, (8, 12)), expected(8, 9, 10, 11))
    assert floor.settle() == (0, 0) and floor.assembly.holdings.bytes == 0


@pytest.mark.parametrize("progress", range(5))
def test_whatever_is_forgotten_is_freed_once(links: WorkerChannels, progress: int) -> None:
    """A run given up at any point: its blocks come back exactly once, but for batches that the consumer holds."""
    floor = Floor(links)
    if progress % 2:
        floor.learn()
    held: list[Any] = []
    if progress >= 1:
        floor.prepare(0, 8, bad=6)
        for serial in range(8, 12):
            floor.assembly.samples.inspected(spans((serial, serial + 1)), [floor.worker.put(b"header" * 100)])
    if progress >= 2:
        floor.learn()
        held.append(floor.batch(0, (0, 4)))
    if progress >= 3:
        floor.prepare(8, 12, odd=9)
        floor.assembly.compose(Compose(OutputBatch(1), spans((4, 8)), (TicketId(6),)))
    if progress >= 4:
        assert floor.assembly.compose(Compose(OutputBatch(2), spans((8, 12))))
        floor.joined(2, torch.ones(5))
    before = floor.settle()
    marks, memory = floor.assembly.clear()
    assert len(marks) == len(set(marks))
    assert floor.settle() == before or progress == 4, "it may still be written to"
    del memory
    assert floor.assembly.holdings.bytes == 0
    in_use, of_worker = floor.settle()
    assert of_worker == 0 and (in_use > 0) == bool(held)
    for batch in held:
        assert same(batch, expected(0, 1, 2, 3))
    held.clear()
    batch = None
    assert floor.settle() == (0, 0), batch
    assert len(links.engine_arena._begins) == 1, "free blocks did not join"


def test_a_full_ring_keeps_blocks_for_later(links: WorkerChannels) -> None:
    floor = Floor(links)
    floor.leases.give_back((0, 4096 * number) for number in range(20_000))
    floor.assembly.holdings.reclaim()
    rest = len(floor.leases._given_back)
    assert rest > 0 and len(links.board.returned(0)) + rest == 20_000
    floor.assembly.holdings.reclaim()
    assert len(links.board.returned(0)) == rest and not floor.leases._given_back


def test_the_marks_of_a_place_that_is_used_up_serve_another(links: WorkerChannels) -> None:
    floor = Floor(links, places=1)
    floor.learn()
    marks = floor.assembly.window.at(TicketId(0)).marks
    floor.prepare(0, 4)
    floor.batch(0, (0, 4))
    assert marks >= 0 and links.completions.reserve(4) == marks


def test_a_part_of_a_place_has_its_own_keys_and_occurrences() -> None:
    """What a resume out of order has left of a batch: it would draw what another sample has drawn."""
    place = Record(0, TicketId(8), positions(8, 12), [5, 7, 5, 5], [0, 0, 1, 2])
    part, serials = place.part(2, 4), (TicketId(10), TicketId(11))
    assert [part.ticket(serial) for serial in serials] == [place.ticket(serial) for serial in serials]


X = Field(np.float32, (1000,))


def _nothing(*_: Any) -> Any:
    raise AssertionError("never run")


def _stage(name: str) -> Stage:
    return Stage(name, ("x",), {"x": X}, cpu=_nothing, device=CupyFunction(_nothing))


PIPELINE = Pipeline(
    (Stage("read", ("n",), {"x": X}, cpu=_nothing), _stage("a"), _stage("b")), outputs=("x",), name="tests"
)
CUT = 2


def estimator(built: bool = True) -> CutEstimator:
    model = CostModel(part_names(PIPELINE), features=1)
    made = CutEstimator(model, ("cpu", "device"), PIPELINE, ["device"])
    made.offered("device", Offers(frozenset([CUT]) if built else frozenset()))
    return made


def teach(made: CutEstimator, lane: str, first: int, each: tuple[float, ...]) -> None:
    """Two hundred samples of which the parts took ``each``."""
    keys = list(range(200))
    for key in keys:
        made._features[TicketId(key)] = (1.0 + key % 7,)
    seconds = [sum(each)] * 200
    serials = [*map(TicketId, keys)]
    parts: list[Part | None] = [(first, each)] * 200
    made.measured(lane, Observed(keys, serials, seconds, sum(seconds), parts, [-1] * 200))


def ask(made: CutEstimator) -> tuple[float, float, Sequence[Plan]]:
    cpu, device, between = made.of_features([TicketId(900)], [900], [(3.0,)])
    return cpu[0], device[0], between[0]


def test_a_plan_costs_the_sum_of_its_parts_and_a_rest_of_its_own() -> None:
    made = estimator()
    teach(made, "cpu", 1, (6e-3, 2e-3))
    teach(made, "device", 1, (4e-3,))
    teach(made, "device", CUT, (5e-4,))
    cpu, device, (plan,) = ask(made)
    assert [cpu, device] == pytest.approx([8e-3, 4e-3], rel=0.02)
    assert list(plan) == pytest.approx([CUT, 6e-3, 5e-4, 0.0], rel=0.02)


def test_nothing_is_offered_before_both_lanes_are_known_or_a_graph_is_built() -> None:
    made = estimator()
    assert ask(made)[2] == ()
    teach(made, "cpu", 1, (6e-3, 2e-3))
    assert ask(made)[2] == ()
    other = estimator(built=False)
    teach(other, "cpu", 1, (6e-3, 2e-3))
    teach(other, "device", 1, (4e-3,))
    assert ask(other)[2] == ()


def test_of_a_place_only_some_may_have_been_inspected(links: WorkerChannels) -> None:
    # those that were fetched before a device lane opened were not
    floor = Floor(links)
    floor.learn()
    source = floor.worker.put({"bytes": b"x" * 10})
    floor.assembly.samples.inspected(spans((1, 2)), [source])
    [piece] = floor.assembly.pieces([span(0, 4)], inspect=False)
    assert piece.sources == [None, source, None, None]
    floor.prepare(0, 4)
    floor.assembly.samples.used([span(0, 4)])
    assert same(floor.batch(0, (0, 4)), expected(0, 1, 2, 3))
    assert floor.settle() == (0, 0)
