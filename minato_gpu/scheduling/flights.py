"""Chunks in flight: their tickets, their progress, and what is taken back of them.

A lane is asked for the progress of a chunk that takes longer than predicted. Samples that wait behind a slow one are
revoked, and the slow one is handed over to a device that would finish it sooner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import Any

from minato_gpu.samples import TicketId
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.intake import STORE_S, Intake
from minato_gpu.scheduling.lane_state import LaneState
from minato_gpu.scheduling.ledger import NONE, Held, Ledger
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.spans import cut
from minato_gpu.scheduling.waiting import Entry, Waiting

PATIENCE_S = 5e-3  # no progress is asked for before a chunk has run this long
LATE = 2.0  # times the predicted seconds after which a sample is slow, or a lease is asked for progress


class Flight:
    """One chunk in flight."""

    __slots__ = (
        *("check_at", "chunk", "credit", "done", "parts", "promised", "reads", "reported_bytes", "sample_s", "sent"),
        *("single_tickets", "size", "task", "timed"),
    )

    def __init__(self, chunk: m.Chunk, parts: Sequence[Entry], sent: float = 0.0) -> None:
        self.chunk = chunk
        self.size = chunk.size
        self.parts = parts
        self.single_tickets = len(parts) == self.size  # each part is one ticket
        self.reads = any(part.read for part in parts)  # an earlier step's results are stored for some
        self.done = 0  # samples reported ready
        self.credit = chunk.credit  # bytes that the lane may prepare of it without asking
        self.reported_bytes = 0  # bytes of the samples reported
        self.check_at: float | None = None  # when progress is asked for
        self.promised = 0.0  # device seconds that follow after a hand-over
        self.sent = sent  # time of the dispatch
        self.task: Any = None  # the lane's task; not used by the scheduler
        self.timed = False  # sent to a free slot of a lane whose speed is learned
        self.sample_s = 0.0  # seconds of the samples reported, if ``timed``

    @property
    def promised_bytes(self) -> int:
        """Bytes that the lane may still prepare of it without asking."""
        return max(0, self.credit - self.reported_bytes)

    def at(self, offset: int) -> tuple[Entry, TicketId]:
        """Returns the entry and the serial of sample number ``offset`` of the chunk. Raises IndexError."""
        if self.single_tickets:
            return self.parts[offset], self.parts[offset].lo
        for part in self.parts:
            if offset < part.hi - part.lo:
                return part, TicketId(part.lo + offset)
            offset -= part.hi - part.lo
        raise IndexError(f"chunk {self.chunk.number} has no sample {offset}")

    def predicted(self, start: int, stop: int, each: float) -> float:
        """Returns the predicted seconds of samples ``start`` to ``stop`` on a slot of this host; ``each`` for one of
        unknown cost."""
        total, offset = 0.0, 0
        for part in self.parts:
            size = part.hi - part.lo
            count = min(stop - offset, size) - max(start - offset, 0)
            total += max(count, 0) * (each if part.cpu is None else part.cpu)
            offset += size
        return total

    def held(self, offsets: Sequence[int]) -> Held:
        """Returns of how many samples at these offsets the result of a host read is stored, and of how many that of a
        hand-over."""
        if not self.reads:
            return NONE
        if len(self.parts) == 1:
            return (0, len(offsets)) if self.parts[0].stage else (len(offsets), 0)
        parts = [part for part, _ in map(self.at, offsets) if part.read]
        handed = sum(part.stage > 0 for part in parts)
        return len(parts) - handed, handed


class Flights:
    """The chunks in flight, ``by_number``."""

    def __init__(
        self, policy: Policy, ledger: Ledger, lanes: Mapping[str, LaneState], waiting: Waiting, intake: Intake
    ) -> None:
        self.by_number: dict[int, Flight] = {}
        self.now = 0.0
        self._policy, self._ledger, self._lanes, self._waiting, self._intake = policy, ledger, lanes, waiting, intake
        self._checks: list[tuple[float, int]] = []  # heap of (time, chunk), with stale entries

    # --- chunks come back -------------------------------------------------------------------------------------

    def give_back(self, flight: Flight, start: int, stop: int) -> None:
        """Queues samples number ``start`` to ``stop`` of the chunk again, with their predicted costs."""
        offset = 0
        for part in flight.parts:
            lo, hi = TicketId(part.lo + max(0, start - offset)), min(part.hi, TicketId(part.lo + stop - offset))
            offset += part.hi - part.lo
            if lo < hi:
                if flight.chunk.kind == "run":
                    self._ledger.stop(hi - lo, flight.chunk.stop >= 0)
                entry = part.part(lo, hi)
                self._intake.reconsider_side(entry)
                self._waiting.add(entry)

    def retire(self, number: int) -> Flight:
        """Removes and returns a chunk that its lane has ended."""
        flight = self.by_number.pop(number)
        self._intake.router.promised -= flight.promised
        self._lanes[flight.chunk.lane].remove(flight.chunk)
        if flight.credit:
            self._use(flight, 0)
        return flight

    def add_reported(self, flight: Flight, nbytes: int) -> None:
        """Counts ``nbytes`` of newly reported samples against the chunk's credit."""
        self._use(flight, flight.credit, nbytes)

    def _use(self, flight: Flight, credit: int, nbytes: int = 0) -> None:
        """Sets the chunk's credit, and counts ``nbytes`` more of it as used."""
        self._ledger.promised -= flight.promised_bytes
        flight.credit = credit
        flight.reported_bytes += nbytes
        self._ledger.promised += flight.promised_bytes

    def shorten(self, flight: Flight, keep: int, nbytes: int) -> None:
        """Cuts the chunk to its first ``keep`` samples, and queues the others again. Their share of the credit is
        freed, except what the kept ones use: they hold ``nbytes`` already."""
        chunk = flight.chunk
        seconds = chunk.seconds * keep / chunk.size
        self._lanes[chunk.lane].seconds -= chunk.seconds - seconds
        self.promise(flight, flight.promised * keep / chunk.size)
        self.give_back(flight, keep, chunk.size)
        if flight.credit:
            self._use(flight, max(chunk.credit * keep // chunk.size, nbytes))
        flight.chunk, flight.size = replace(chunk, spans=cut(chunk.spans, 0, keep), seconds=seconds), keep

    def requeue_at_stage(self, flight: Flight, offset: int, stage: int) -> None:
        """Queues sample number ``offset`` of the chunk for a lane that continues at ``stage``."""
        part, serial = flight.at(offset)
        self._intake.add_rest(part.rest(serial, stage))

    def promise(self, flight: Flight, seconds: float) -> None:
        """Sets the device seconds that will follow on this chunk."""
        self._intake.router.promised += seconds - flight.promised
        flight.promised = seconds

    # --- progress of chunks ----------------------------------------------------------------------------------

    def check_after(self, flight: Flight, after: float) -> None:
        """Schedules a progress report of the chunk in ``after`` seconds."""
        flight.check_at = self.now + after
        heappush(self._checks, (flight.check_at, flight.chunk.number))

    def next_check(self) -> float | None:
        """Returns when the next progress report is wanted; None for never."""
        while self._checks:
            when, number = self._checks[0]
            flight = self.by_number.get(number)
            if flight is not None and flight.check_at == when:
                return when
            heappop(self._checks)
        return None

    def postpone(self) -> None:
        """Schedules another report of each chunk whose report is overdue: all that run have been reported, so these
        have not begun."""
        while (when := self.next_check()) is not None and when <= self.now:
            self.check_after(self.by_number[self._checks[0][1]], PATIENCE_S)

    def running(self, event: m.Running) -> m.Instruction | None:
        """Handles progress of a chunk; returns an instruction to take samples back or to hand one over, or None."""
        flight = self.by_number.get(event.chunk)
        if flight is None or flight.check_at is None:
            return None
        chunk, keep = flight.chunk, event.done + 1
        if keep > chunk.size:  # all is reported, and the final report is to come
            return None
        if keep == chunk.size:
            return self._rescue(flight, event)
        late = event.since_s > max(PATIENCE_S / 2, 2 * chunk.seconds / chunk.size)
        if late and self._intake.pace.cpu_slots > 1 and not self._policy.streams:
            keep = self._samples_to_keep(flight, event.done, event.since_s)
        else:
            keep = chunk.size
        if keep < chunk.size:
            flight.check_at = None
            return m.Revoke(chunk.lane, event.chunk, keep)
        if flight.check_at <= event.time:
            self.check_after(flight, PATIENCE_S)
        return None

    def _rescue(self, flight: Flight, event: m.Running) -> m.Instruction | None:
        """Hands the last sample of a chunk over to a device if it runs longer than it should and the device would end
        sooner."""
        chunk = flight.chunk
        predicted = chunk.seconds / chunk.size
        if chunk.stop < 0 and event.since_s >= max(PATIENCE_S, LATE * predicted):
            factor = event.since_s / max(predicted, PATIENCE_S / LATE)
            splits = self._intake.router.rescues(flight.at(event.done)[0], factor, event.since_s)
            if splits:
                flight.check_at = None
                return m.HandOver(chunk.lane, chunk.number, splits)
        if flight.check_at is not None and flight.check_at <= event.time:
            early = LATE * predicted - event.since_s
            self.check_after(flight, max(PATIENCE_S, early if early > 0 else event.since_s / 2))
        return None

    def revoked(self, event: m.Revoked) -> None:
        """Handles the answer to a revocation."""
        flight = self.by_number.get(event.chunk)
        if flight is None:
            return
        if event.keep < flight.chunk.size:
            self.shorten(flight, event.keep, event.nbytes)
        if self._intake.router.may_rescue(flight.at(flight.chunk.size - 1)[0]):
            self.check_after(flight, PATIENCE_S)

    def _samples_to_keep(self, flight: Flight, done: int, since_s: float) -> int:
        """Returns how many samples the slot keeps of its chunk, which is late at number ``done``.

        A place that the slot is to collate is cut only where the time lost and the time left both exceed that of
        storing its samples: on a busy machine a slot may just wait for a core.
        """
        chunk, keep = flight.chunk, done + 1
        if self._policy.joins:
            entry, serial = flight.at(done)
            rest, split_s = entry.hi - serial - 1, STORE_S * (entry.place.end - entry.place.first)
            if since_s <= 2 * split_s:
                return chunk.size
            if chunk.seconds and rest * chunk.seconds / chunk.size <= split_s:
                return keep + rest
        return keep
