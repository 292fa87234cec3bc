"""Iterable data sets: every worker owns a stream, and a ticket is "the next batch of that stream".

In order, batches come in PyTorch's order: one of each worker in turn, leaving out workers whose streams have ended.
Out of order they come by completion, none more than ``max_lateness`` batches after its turn. A slow stream delays
itself alone, within that. Each worker holds ``prefetch`` tickets; a memory budget may leave some of them unsent.

Tickets are numbered in the order of turns, and a ticket that finds its stream at its end drops out of it; so the order
of delivery does not depend on when the end of a stream becomes known. The same events and instructions as for indexed
data sets are used: a chunk has kind "next", lane "cpu:<worker>", and the ticket's number as its own and as its serial.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush

from minato_gpu.samples import OutputBatch, TicketId
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.ledger import Ledger
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.window_length import WindowLength


class StreamScheduler:
    """One epoch of an iterable data set. ``prefetch``: tickets that each of the ``workers`` holds."""

    pending = False  # no lane that becomes free would be given something: workers hold their tickets ahead
    awaited = None  # every batch is reported by the worker whose turn it is
    idle_slots = 0

    def __init__(self, policy: Policy, workers: int, prefetch: int = 2) -> None:
        self.policy = policy
        self.window = WindowLength(0, 0)
        self.prefetch = prefetch
        self.lane_costs: Mapping[str, m.LaneCosts] = {}  # whose turn it is does not depend on what samples take
        self._workers = workers
        self._open = set(range(workers))  # those whose streams have not ended
        self._ledger = Ledger(policy.budget_bytes)
        self._lateness = policy.max_lateness
        self._owners: dict[TicketId, int] = {}  # rising ticket -> worker, until finished or dropped
        self._finished: list[TicketId] = []  # tickets by number: ready and in no batch
        self._failed: set[TicketId] = set()
        self._order = OutputBatch(0)  # batches composed
        self._undelivered: dict[OutputBatch, TicketId] = {}  # order -> ticket
        self._passed: list[TicketId] = []  # composed tickets that overtook an older one
        self._next_ticket = TicketId(0)
        self._turn = 0
        self._delivered = OutputBatch(0)
        self._asked = False
        self._started = False

    # --- the face ---------------------------------------------------------------------------------------------

    def handle(self, event: m.Event) -> list[m.Instruction]:
        """Take one event; return what to do now, in this order. Work is sent from the first ``LaneOpened`` on."""
        out: list[m.Instruction] = []
        if isinstance(event, m.LaneOpened):
            self._started = True
        elif isinstance(event, m.Resumed):
            self._resume(event)
        elif isinstance(event, m.Finished):
            self._finish(event)
        elif isinstance(event, m.Exhausted):
            self._exhaust(TicketId(event.chunk))
        elif isinstance(event, m.Asked):
            self._asked = self._delivered not in self._undelivered
        elif isinstance(event, m.Delivered):
            del self._undelivered[event.order]
            self._ledger.deliver(event.in_flight)
            self._delivered = OutputBatch(event.order + 1)
            self._asked = False
        while (ticket := self._composable()) is not None:
            out.append(self._compose(ticket))
        out += self._send()
        return out

    @property
    def end(self) -> OutputBatch | None:
        """How many batches the epoch has, once every stream has ended; None until then."""
        return None if self._open else OutputBatch(self._order + len(self._finished) + len(self._owners))

    @property
    def room(self) -> int:
        """How many more tickets may be sent."""
        return self.prefetch * len(self._open) - self._held

    def wake_at(self) -> float | None:
        """Never: there is nothing to look into."""
        return None

    def stall_cause(self) -> str:
        """Why the consumer waits."""
        if self._delivered in self._undelivered:
            return "collate"
        if self._finished:
            return "lateness"
        return "preparation"

    # --- events -----------------------------------------------------------------------------------------------

    def _resume(self, event: m.Resumed) -> None:
        self._order = self._delivered = event.order
        self._next_ticket = TicketId(event.order)  # each batch is one ticket
        self._turn = event.turn
        self._open.difference_update(event.ended)

    def _finish(self, event: m.Finished) -> None:
        ticket = TicketId(event.chunk)
        if self._owners.pop(ticket, None) is None:
            return
        self._ledger.ready(1, event.nbytes)
        heappush(self._finished, ticket)
        if event.failed:
            self._failed.add(ticket)

    def _exhaust(self, ticket: TicketId) -> None:
        """The ticket's stream has ended: it and all later tickets of the worker drop out of the order."""
        worker = self._owners.get(ticket)
        if worker is None:
            return
        self._open.discard(worker)
        for dropped in [number for number, owner in self._owners.items() if owner == worker and number >= ticket]:
            del self._owners[dropped]
            self._ledger.running -= 1

    # --- composition ------------------------------------------------------------------------------------------

    def _composable(self) -> TicketId | None:
        """The ticket to deliver next, if there is one."""
        if not self._finished:
            return None
        ticket, oldest = self._finished[0], next(iter(self._owners), None)
        if oldest is None or ticket < oldest:
            return ticket
        eager = self._asked or len(self._undelivered) < self.policy.compose_ahead
        while self._passed and self._passed[0] < oldest:
            heappop(self._passed)
        turn = self._order - len(self._passed)  # how many of those delivered stood before the oldest running one
        return ticket if eager and turn > self._order - self._lateness else None

    def _compose(self, ticket: TicketId) -> m.Compose:
        heappop(self._finished)
        order, self._order = self._order, OutputBatch(self._order + 1)
        self._asked = False
        self._undelivered[order] = ticket
        heappush(self._passed, ticket)
        failed = (ticket,) if ticket in self._failed else ()
        self._failed.discard(ticket)
        return m.Compose(order, ((ticket, TicketId(ticket + 1)),), failed)

    # --- sending ----------------------------------------------------------------------------------------------

    @property
    def _held(self) -> int:
        return len(self._owners) + len(self._finished) + len(self._undelivered)

    def _send(self) -> list[m.Instruction]:
        """Give the next tickets to the workers whose turn it is."""
        out: list[m.Instruction] = []
        while self._started and self.room > 0 and (not self._held or self._ledger.fits(1, self._workers)):
            worker = self._next_worker()
            if worker is None:
                break
            ticket = self._next_ticket
            self._next_ticket = TicketId(ticket + 1)
            self._owners[ticket] = worker
            self._ledger.running += 1
            chunk = m.Chunk(ticket, m.CPU, "next", ((ticket, TicketId(ticket + 1)),), 0.0, worker=worker)
            out.append(m.Dispatch(chunk))
        return out

    def _next_worker(self) -> int | None:
        """The next in rotation whose stream is open; out of order one that holds too many loses its turn."""
        for step in range(self._workers):
            at = (self._turn + step) % self._workers
            if at in self._open and (self._lateness == 0 or self._sent_to(at) < self.prefetch):
                self._turn = (at + 1) % self._workers
                return at
        return None

    def _sent_to(self, worker: int) -> int:
        return sum(owner == worker for owner in self._owners.values())
