"""What the assembly keeps of the places of the sampler's order, and of a batch on its way to the consumer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from minato_gpu.lanes.base import Failure, Item, Laid, Piece, Source
from minato_gpu.memory.loads import Load
from minato_gpu.samples import Key, OutputBatch, Position, Ticket, TicketId, Value
from minato_gpu.scheduling.messages import TicketSpan, count, tickets

_FIRST = OutputBatch(0)


class Record:
    """One place of the order: its tickets, and its slab with the samples that are not plain rows of it.

    ``begins``: the order of its epoch's first batch (see ``scheduling.messages``). ``first`` and ``end``: its serials,
    half-open. ``slab``: where its rows begin, in ``memory``, which is free when nobody refers to it; ``rows``: of the
    slab; ``place_rows``: of the whole place, where this is a piece. ``marks``: see memory/completions.py.
    """

    __slots__ = (
        *("begins", "end", "epoch", "first", "items", "keys", "left", "marks", "memory", "occurrences"),
        *("place_rows", "positions", "rows", "slab", "sources"),
    )

    def __init__(
        self,
        epoch: int,
        first: TicketId,
        positions: Sequence[Position],
        keys: list[Key],
        occurrences: list[int] | None,
        begins: OutputBatch = _FIRST,
    ) -> None:
        self.begins = begins
        self.epoch = epoch
        self.first = first
        self.end = TicketId(first + len(keys))
        self.positions = positions
        self.keys = keys
        self.occurrences = occurrences
        self.slab = self.marks = -1
        self.memory: NDArray[np.uint8] | None = None
        self.rows = self.place_rows = len(keys)
        self.left = len(keys)  # samples that no batch has taken yet
        self.items: dict[TicketId, Item] = {}  # serial -> reference, for all that is not a plain row
        self.sources: dict[TicketId, Source] = {}  # serial -> what the host read left

    def ticket(self, serial: TicketId) -> Ticket:
        """What the sampler asked for under this serial."""
        at = serial - self.first
        occurrence = 0 if self.occurrences is None else self.occurrences[at]
        return Ticket(self.epoch, self.positions[at], self.keys[at], occurrence)

    def part(self, lo: int, hi: int) -> Record:
        """A record for the tickets number ``lo`` to ``hi`` of this one, which has no slab yet."""
        occurrences = None if self.occurrences is None else self.occurrences[lo:hi]
        positions, keys = self.positions[lo:hi], self.keys[lo:hi]
        piece = Record(self.epoch, TicketId(self.first + lo), positions, keys, occurrences, self.begins)
        piece.place_rows = self.place_rows
        return piece


class Window:
    """The places in the window, by the serials that they hold."""

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._firsts: list[TicketId] = []

    def admit(self, record: Record) -> None:
        """A place enters; places come in rising order of serials."""
        self._records.append(record)
        self._firsts.append(record.first)

    def at(self, serial: TicketId) -> Record:
        """The place that holds the serial."""
        return self._records[bisect_right(self._firsts, serial) - 1]

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

    def described(self, spans: Iterable[TicketSpan]) -> tuple[Piece, ...]:
        """The tickets of a batch that a job joins."""
        found = [self.at(serial).ticket(serial) for serial in tickets(spans)]
        keys, positions = [ticket.index for ticket in found], [ticket.position for ticket in found]
        occurrences = [ticket.occurrence for ticket in found]
        return (Piece(positions[0], keys, occurrences, -1, 0, 0, False, None, positions),)

    def parts(self, spans: Iterable[TicketSpan]) -> Iterator[tuple[Record, TicketId, TicketId]]:
        """The spans cut where places meet: each part with its place. A part's place may be removed meanwhile."""
        for lo, hi in spans:
            while lo < hi:
                record = self.at(lo)
                upto = min(hi, record.end)
                yield record, lo, upto
                lo = upto

    def records(self) -> list[Record]:
        """All places."""
        return self._records

    def remove(self, record: Record) -> None:
        """A place leaves."""
        at = bisect_right(self._firsts, record.first) - 1
        del self._records[at], self._firsts[at]

    def clear(self) -> list[Record]:
        """All places leave; returns them."""
        records, self._records, self._firsts = self._records, [], []
        return records


class Batch:
    """A composed batch: what it is made of until it is ready, then the way to its value.

    ``order``: its number among all of the run; ``number``: within its epoch (see ``scheduling.messages``).
    """

    __slots__ = (
        "bad",
        "dealt",
        "ends",
        "failed",
        "failure",
        "item",
        "lent",
        "load",
        "nbytes",
        "number",
        "objects",
        "order",
        "owner",
        "ready",
        "size",
        "spans",
    )

    def __init__(self, spans: tuple[TicketSpan, ...], order: OutputBatch, number: int) -> None:
        self.order, self.number = order, number
        self.dealt = spans  # with those that were left out
        self.spans = spans
        self.bad: list[Failure] = []  # samples that were left out
        self.ends: tuple[Ticket, Ticket] | None = None  # where some may be: the first and the last that were not
        self.size = count(spans)
        self.nbytes = 0
        self.failed = 0
        self.ready = False
        self.failure: Failure | None = None
        self.owner: NDArray[np.uint8] | None = None
        self.objects: list[list[Value]] = []
        self.item: Laid | Failure | None = None
        self.lent: Callable[[], Value] | None = None  # once it is taken: how the consumer gets at ``item``
        self.load: Load | None = None  # on its way to a device
