"""A chunk under way: its tickets, and how far it has come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minato_gpu.samples import TicketId
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.ledger import NONE, Held
from minato_gpu.scheduling.waiting import Entry


class Flight:
    """A chunk under way: the tickets in it, how many are reported ready, and when it may be looked into next."""

    __slots__ = (
        *("alone", "chunk", "credit", "done", "look_at", "parts", "promised", "reads", "sent", "size", "task", "told"),
        *("times", "took"),
    )

    def __init__(self, chunk: m.Chunk, parts: Sequence[Entry], sent: float = 0.0) -> None:
        self.chunk = chunk
        self.size = chunk.size
        self.parts = parts
        self.alone = len(parts) == self.size  # each part is one ticket
        self.reads = any(part.read for part in parts)  # something lies ready that an earlier step has left
        self.done = 0
        self.credit = chunk.credit  # bytes that the lane may prepare of it without asking
        self.told = 0  # bytes of what is reported
        self.look_at: float | None = None
        self.promised = 0.0  # seconds of the device that are to follow
        self.sent = sent  # when it went to its lane
        self.task: Any = None  # what it went as; the scheduler does not look at it
        self.times = False  # the lane learns, and had a free slot then
        self.took = 0.0  # seconds of its samples that are reported, in such a lane

    @property
    def promised_bytes(self) -> int:
        """What the lane may still prepare of it without asking."""
        return max(0, self.credit - self.told)

    def at(self, offset: int) -> tuple[Entry, TicketId]:
        """The ticket that sample number ``offset`` of the chunk belongs to, and its serial."""
        if self.alone:
            return self.parts[offset], self.parts[offset].lo
        for part in self.parts:
            if offset < part.hi - part.lo:
                return part, TicketId(part.lo + offset)
            offset -= part.hi - part.lo
        raise IndexError(f"chunk {self.chunk.number} has no sample {offset}")

    def predicted(self, start: int, stop: int, each: float) -> float:
        """Seconds of the kind's that samples number ``start`` to ``stop`` take; ``each``: one of which nothing is
        known."""
        total, offset = 0.0, 0
        for part in self.parts:
            size = part.hi - part.lo
            count = min(stop - offset, size) - max(start - offset, 0)
            total += max(count, 0) * (each if part.cpu is None else part.cpu)
            offset += size
        return total

    def held(self, offsets: Sequence[int]) -> Held:
        """Of how many of these samples something lies ready that an earlier step has left."""
        if not self.reads:
            return NONE
        if len(self.parts) == 1:
            return (0, len(offsets)) if self.parts[0].at else (len(offsets), 0)
        parts = [part for part, _ in map(self.at, offsets) if part.read]
        handed = sum(part.at > 0 for part in parts)
        return len(parts) - handed, handed
