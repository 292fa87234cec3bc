"""What the assembly keeps of the places of the sampler's order, and of a batch on its way to the consumer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from minato_gpu.device.loads import Load
from minato_gpu.lanes.base import Failure, Item, Piece, Resident, Source
from minato_gpu.samples import Key, OutputBatch, Position, Ticket, TicketId, Value
from minato_gpu.spans import BySerial, TicketSpan, count, serials, tickets

_FIRST = OutputBatch(0)


@dataclass(slots=True, eq=False)
class Record:
    """One place of the order: its tickets, and its slab with the samples that are not plain rows of it.

    ``begins``: the order of its epoch's first batch (see ``scheduling.messages``). ``first`` and ``end``: its serials,
    half-open. ``slab``: where its rows begin, in ``memory``, which is free when nobody refers to it; ``rows``: of the
    slab; ``place_rows``: of the whole place, where this is a piece. ``marks``: see memory/completions.py. ``left``:
    samples that no batch has taken yet. ``items``: a reference for each that is not a plain row; ``sources``: what the
    host read left.
    """

    epoch: int
    first: TicketId
    positions: Sequence[Position]
    keys: list[Key]
    occurrences: list[int] | None
    begins: OutputBatch = _FIRST
    slab: int = -1
    memory: NDArray[np.uint8] | None = None
    marks: int = -1
    items: dict[TicketId, Item] = field(default_factory=dict)
    sources: dict[TicketId, Source] = field(default_factory=dict)
    end: TicketId = field(init=False)
    rows: int = field(init=False)
    place_rows: int = field(init=False)
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows = self.place_rows = self.left = len(self.keys)
        self.end = TicketId(self.first + self.rows)

    def ticket(self, serial: TicketId) -> Ticket:
        """What the sampler asked for under this serial."""
        at = serial - self.first
        occurrence = 0 if self.occurrences is None else self.occurrences[at]
        return Ticket(self.epoch, self.positions[at], self.keys[at], occurrence)

    def residents(self, lo: TicketId, hi: TicketId) -> list[tuple[TicketId, Resident]]:
        """The samples of these of which a part lies on a device."""
        items = ((serial, self.items.get(serial)) for serial in serials(lo, hi)) if self.items else ()
        return [(serial, item) for serial, item in items if isinstance(item, Resident)]

    def part(self, lo: int, hi: int) -> Record:
        """A record for the tickets number ``lo`` to ``hi`` of this one, which has no slab yet."""
        occurrences = None if self.occurrences is None else self.occurrences[lo:hi]
        positions, keys = self.positions[lo:hi], self.keys[lo:hi]
        piece = Record(self.epoch, TicketId(self.first + lo), positions, keys, occurrences, self.begins)
        piece.place_rows = self.place_rows
        return piece


class Window(BySerial[Record]):
    """The places in the window."""

    def ticket(self, serial: TicketId) -> Ticket:
        """What the sampler asked for under this serial."""
        return self.at(serial).ticket(serial)

    def key(self, serial: TicketId) -> Key:
        """The data set's key of a ticket."""
        record = self.at(serial)
        return record.keys[serial - record.first]

    def keys(self, spans: Iterable[TicketSpan]) -> list[Key]:
        """The keys of these tickets."""
        found: list[Key] = []
        for record, lo, hi in self.parts(spans):
            found += record.keys[lo - record.first : hi - record.first]
        return found

    def position(self, serial: TicketId) -> Position:
        """The ticket's place in the sampler's order of its epoch."""
        record = self.at(serial)
        return record.positions[serial - record.first]

    def described(self, spans: Iterable[TicketSpan]) -> Piece:
        """The tickets of a batch that a job joins."""
        found = [self.ticket(serial) for serial in tickets(spans)]
        keys, positions = [ticket.index for ticket in found], [ticket.position for ticket in found]
        occurrences = [ticket.occurrence for ticket in found]
        return Piece(positions[0], keys, occurrences, joins=True, positions=positions)


@dataclass(slots=True, eq=False)
class Batch:
    """A composed batch: what it is made of until it is ready, then the way to its value.

    ``order``: its number among all of the run; ``number``: within its epoch (see ``scheduling.messages``). ``dealt``:
    its samples with those that were left out of ``spans``, ``bad``; ``good``: where some may be, the last that was not.
    ``lent``: how the consumer gets at it. ``items``: the same for each of a run of samples that count as
    ``orders`` batches; the first is ``dealt``. ``load``: on its way to a device.
    """

    spans: tuple[TicketSpan, ...]
    order: OutputBatch
    number: int
    bad: list[Failure] = field(default_factory=list)
    good: Ticket | None = None
    nbytes: int = 0
    failed: int = 0
    ready: bool = False
    failure: Failure | None = None
    lent: Callable[[], Value] | None = None
    items: list[Callable[[], Value]] = field(default_factory=list)
    load: Load | None = None
    orders: int = 1
    dealt: tuple[TicketSpan, ...] = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.dealt, self.size = self.spans, count(self.spans)
