"""The assembly's records: places of the sampler's order, and batches on their way to the consumer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from minato_gpu.device.loads import Load
from minato_gpu.lanes.base import Failure, HostRead, Item, Piece, Resident
from minato_gpu.samples import Key, OutputBatch, Position, Ticket, TicketId, Value
from minato_gpu.scheduling.spans import BySerial, TicketSpan, count, serials, tickets

_FIRST = OutputBatch(0)


@dataclass(slots=True, eq=False)
class Record:
    """One place of the order: its tickets, and its slab with the samples that are not plain rows of it."""

    epoch: int
    first: TicketId
    positions: Sequence[Position]
    keys: list[Key]
    occurrences: list[int] | None
    begins: OutputBatch = _FIRST  # the order of its epoch's first batch (see ``scheduling.messages``)
    slab: int = -1  # where its rows begin, in ``memory``
    memory: NDArray[np.uint8] | None = None  # free when nobody refers to it
    marks: int = -1  # see memory/completions.py
    items: dict[TicketId, Item] = field(default_factory=dict)  # item of each sample that is not a plain row
    sources: dict[TicketId, HostRead] = field(default_factory=dict)  # their stored inputs
    end: TicketId = field(init=False)
    rows: int = field(init=False)  # rows of the slab
    place_rows: int = field(init=False)  # rows of the whole place, where this is a piece of one
    left: int = field(init=False)  # samples that no batch has taken yet

    def __post_init__(self) -> None:
        self.rows = self.place_rows = self.left = len(self.keys)
        self.end = TicketId(self.first + self.rows)

    def ticket(self, serial: TicketId) -> Ticket:
        """Returns what the sampler asked for under this serial."""
        at = serial - self.first
        occurrence = 0 if self.occurrences is None else self.occurrences[at]
        return Ticket(self.epoch, self.positions[at], self.keys[at], occurrence)

    def residents(self, lo: TicketId, hi: TicketId) -> list[tuple[TicketId, Resident]]:
        """Returns the samples from serial ``lo`` to ``hi`` of which a part is on a device: serial and item."""
        items = ((serial, self.items.get(serial)) for serial in serials(lo, hi)) if self.items else ()
        return [(serial, item) for serial, item in items if isinstance(item, Resident)]

    def part(self, lo: int, hi: int) -> Record:
        """Returns a record for tickets number ``lo`` to ``hi`` of this one, without a slab."""
        occurrences = None if self.occurrences is None else self.occurrences[lo:hi]
        positions, keys = self.positions[lo:hi], self.keys[lo:hi]
        piece = Record(self.epoch, TicketId(self.first + lo), positions, keys, occurrences, self.begins)
        piece.place_rows = self.place_rows
        return piece


class Window(BySerial[Record]):
    """The places in the window."""

    def ticket(self, serial: TicketId) -> Ticket:
        """Returns what the sampler asked for under this serial."""
        return self.at(serial).ticket(serial)

    def key(self, serial: TicketId) -> Key:
        """Returns the data set's key of a ticket."""
        record = self.at(serial)
        return record.keys[serial - record.first]

    def keys(self, spans: Iterable[TicketSpan]) -> list[Key]:
        """Returns the keys of these tickets."""
        found: list[Key] = []
        for record, lo, hi in self.parts(spans):
            found += record.keys[lo - record.first : hi - record.first]
        return found

    def position(self, serial: TicketId) -> Position:
        """Returns the ticket's place in the sampler's order of its epoch."""
        record = self.at(serial)
        return record.positions[serial - record.first]

    def described(self, spans: Iterable[TicketSpan]) -> Piece:
        """Returns the tickets of a batch as one piece, for the job that joins it."""
        found = [self.ticket(serial) for serial in tickets(spans)]
        keys, positions = [ticket.index for ticket in found], [ticket.position for ticket in found]
        occurrences = [ticket.occurrence for ticket in found]
        return Piece(positions[0], keys, occurrences, joins=True, positions=positions)


@dataclass(slots=True, eq=False)
class Batch:
    """A composed batch: its parts until it is ready, then the way to its value."""

    spans: tuple[TicketSpan, ...]  # tickets of its samples
    order: OutputBatch  # its number among all batches of the run
    number: int  # in its epoch
    bad: list[Failure] = field(default_factory=list)  # samples that were left out
    good: Ticket | None = None  # the last sample that was not left out, where samples may be
    nbytes: int = 0
    failed: int = 0
    ready: bool = False
    failure: Failure | None = None
    lent: Callable[[], Value] | None = None  # returns its value to the consumer
    items: list[Callable[[], Value]] = field(default_factory=list)  # the same for each of a run of samples
    load: Load | None = None  # on its way to a device
    orders: int = 1  # batches that a run of samples counts as
    dealt: tuple[TicketSpan, ...] = field(init=False)  # tickets of its samples, and of those that were left out
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.dealt, self.size = self.spans, count(self.spans)
