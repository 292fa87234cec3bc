"""Chunks under way: their tickets, how far they have come, and what is taken back of them.

A lane is asked about a lease that takes longer than predicted. What a slow sample holds up there is taken back, and the
sample itself goes on with a device where that would sooner be through with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import Any

from minato_gpu.samples import TicketId
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.intake import LAID_DOWN_S, Intake
from minato_gpu.scheduling.lane_state import LaneState
from minato_gpu.scheduling.ledger import NONE, Held, Ledger
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.waiting import Entry, Waiting
from minato_gpu.spans import cut

PATIENCE_S = 5e-3  # a chunk is not looked into before it has run this long
LATE = 2.0  # a sample that has run this many times as long as predicted is slow; a lease of several is looked into


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


class Flights:
    """The chunks under way, ``by_number``: when lanes should report of them, and what comes back."""

    def __init__(
        self, policy: Policy, ledger: Ledger, lanes: Mapping[str, LaneState], waiting: Waiting, intake: Intake
    ) -> None:
        self.by_number: dict[int, Flight] = {}
        self.now = 0.0
        self._policy, self._ledger, self._lanes, self._waiting, self._intake = policy, ledger, lanes, waiting, intake
        self._looks: list[tuple[float, int]] = []  # (when, chunk), with dead entries

    # --- chunks come back -------------------------------------------------------------------------------------

    def give_back(self, flight: Flight, start: int, stop: int) -> None:
        """Samples number ``start`` to ``stop`` of the chunk wait again, with the costs that they had."""
        offset = 0
        for part in flight.parts:
            lo, hi = TicketId(part.lo + max(0, start - offset)), min(part.hi, TicketId(part.lo + stop - offset))
            offset += part.hi - part.lo
            if lo < hi:
                if flight.chunk.kind == "run":
                    self._ledger.stop(hi - lo, flight.chunk.stop >= 0)
                entry = part.part(lo, hi)
                self._intake.settle_again(entry)
                self._waiting.add(entry)

    def retire(self, number: int) -> Flight:
        """The chunk's lane is through with it."""
        flight = self.by_number.pop(number)
        self._intake.router.promised -= flight.promised
        self._lanes[flight.chunk.lane].remove(flight.chunk)
        if flight.credit:
            self._use(flight, 0)
        return flight

    def told(self, flight: Flight, nbytes: int) -> None:
        """Further samples of the chunk, which has a credit, are reported, and hold ``nbytes``."""
        self._use(flight, flight.credit, nbytes)

    def _use(self, flight: Flight, credit: int, nbytes: int = 0) -> None:
        """The chunk has this credit from now on, and ``nbytes`` more of it are used."""
        self._ledger.promised -= flight.promised_bytes
        flight.credit = credit
        flight.told += nbytes
        self._ledger.promised += flight.promised_bytes

    def shorten(self, flight: Flight, keep: int, nbytes: int) -> None:
        """The lane will start no sample of the chunk from offset ``keep`` on. Their share of its credit is free again,
        but for what those before them have used of it: they hold ``nbytes`` already."""
        chunk = flight.chunk
        seconds = chunk.seconds * keep / chunk.size
        self._lanes[chunk.lane].shorten(chunk.seconds - seconds)
        self.promise(flight, flight.promised * keep / chunk.size)
        self.give_back(flight, keep, chunk.size)
        if flight.credit:
            self._use(flight, max(chunk.credit * keep // chunk.size, nbytes))
        flight.chunk, flight.size = replace(chunk, spans=cut(chunk.spans, 0, keep), seconds=seconds), keep

    def hand_on(self, flight: Flight, offset: int, stage: int) -> None:
        """Sample number ``offset`` of the chunk has come to ``stage`` and waits for a lane that goes on with it."""
        part, serial = flight.at(offset)
        self._intake.add_rest(part.rest(serial, stage))

    def promise(self, flight: Flight, seconds: float) -> None:
        """So much is to follow on the device when the chunk is done."""
        self._intake.router.promised += seconds - flight.promised
        flight.promised = seconds

    # --- looking into chunks ----------------------------------------------------------------------------------

    def look_again(self, flight: Flight, after: float) -> None:
        """The chunk should be reported ``after`` seconds from now."""
        flight.look_at = self.now + after
        heappush(self._looks, (flight.look_at, flight.chunk.number))

    def next_look(self) -> float | None:
        """When the next unfinished chunk should be reported."""
        while self._looks:
            when, number = self._looks[0]
            flight = self.by_number.get(number)
            if flight is not None and flight.look_at == when:
                return when
            heappop(self._looks)
        return None

    def postpone(self) -> None:
        """All that runs has been reported; a chunk that should have been and was not has not begun: look later."""
        while (when := self.next_look()) is not None and when <= self.now:
            self.look_again(self.by_number[self._looks[0][1]], PATIENCE_S)

    def running(self, event: m.Running) -> m.Instruction | None:
        """How far a chunk has come: returns what of it is to be taken back, or handed over."""
        flight = self.by_number.get(event.chunk)
        if flight is None or flight.look_at is None:
            return None
        chunk, keep = flight.chunk, event.done + 1
        if keep > chunk.size:  # all is reported, and the lane has yet to say that it is through
            return None
        if keep == chunk.size:
            return self._rescue(flight, event)
        late = event.since_s > max(PATIENCE_S / 2, 2 * chunk.seconds / chunk.size)
        if late and self._intake.pace.cpu_slots > 1 and not self._policy.streams:
            keep = self._kept(flight, event.done, event.since_s)
        else:
            keep = chunk.size
        if keep < chunk.size:
            flight.look_at = None
            return m.Revoke(chunk.lane, event.chunk, keep)
        if flight.look_at <= event.time:
            self.look_again(flight, PATIENCE_S)
        return None

    def _rescue(self, flight: Flight, event: m.Running) -> m.Instruction | None:
        """Let a device go on with a chunk's last sample that has run for longer than it should, if that helps."""
        chunk = flight.chunk
        predicted = chunk.seconds / chunk.size
        if chunk.stop < 0 and event.since_s >= max(PATIENCE_S, LATE * predicted):
            factor = event.since_s / max(predicted, PATIENCE_S / LATE)
            splits = self._intake.router.rescues(flight.at(event.done)[0], factor, event.since_s)
            if splits:
                flight.look_at = None
                return m.HandOver(chunk.lane, chunk.number, splits)
        if flight.look_at is not None and flight.look_at <= event.time:
            early = LATE * predicted - event.since_s
            self.look_again(flight, max(PATIENCE_S, early if early > 0 else event.since_s / 2))
        return None

    def revoked(self, event: m.Revoked) -> None:
        """The lane has given some of the chunk back."""
        flight = self.by_number.get(event.chunk)
        if flight is None:
            return
        if event.keep < flight.chunk.size:
            self.shorten(flight, event.keep, event.nbytes)
        if self._intake.router.may_rescue(flight.at(flight.chunk.size - 1)[0]):
            self.look_again(flight, PATIENCE_S)

    def _kept(self, flight: Flight, done: int, since_s: float) -> int:
        """How many samples of the chunk its slot keeps, which is late with number ``done``. A place that it is to join
        is cut only where both what is lost and what is left of it are worth more than laying its samples down: on a
        busy machine a slot may just wait for a core."""
        chunk, keep = flight.chunk, done + 1
        if self._policy.joins:
            entry, serial = flight.at(done)
            rest, split_s = entry.hi - serial - 1, LAID_DOWN_S * (entry.place.end - entry.place.first)
            if since_s <= 2 * split_s:
                return chunk.size
            if chunk.seconds and rest * chunk.seconds / chunk.size <= split_s:
                return keep + rest
        return keep
