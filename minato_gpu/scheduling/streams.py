"""``Streams``: scheduling of iterable data sets, where every worker owns a stream and a ticket is one batch of it.

In strict order batches come in PyTorch's order: one of each worker in turn, leaving out workers whose streams have
ended. Out of order they come as completed, none more than ``max_lateness`` batches after its turn, so that a slow
stream delays only itself. The order of delivery does not depend on when the end of a stream becomes known: tickets past
the end drop out.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections import deque

from minato_gpu.samples import OutputBatch, SourceBatch, TicketId
from minato_gpu.scheduling.composition import Composition
from minato_gpu.scheduling.dispatch import Dispatcher
from minato_gpu.scheduling.flights import Flight
from minato_gpu.scheduling.ledger import Ledger
from minato_gpu.scheduling.messages import Admitted, Awaited, Compose, Finished
from minato_gpu.scheduling.places import Place, Places
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.spans import TicketSpan, joined, serials, singles


class Streams(Composition):
    """Chooses which worker is asked for batches of its stream next, and composes the batches in order."""

    def __init__(self, places: Places, policy: Policy) -> None:
        super().__init__(places, policy.max_lateness)
        self.lease = 1  # batches that a worker is asked for at once
        self._workers, self._prefetch = policy.streams, policy.window // policy.streams
        self._runs = policy.items
        self._open = set(range(policy.streams))  # workers whose streams have not ended
        self._turn = 0
        self._next_ticket = TicketId(0)
        self._outstanding = 0  # tickets that are in no batch
        # by worker: unfinished leases, running tickets, and tickets that are ready and in no batch
        self._leases: list[deque[TicketSpan]] = [deque() for _ in range(policy.streams)]
        self._running = [0] * policy.streams
        self._ready: list[deque[TicketId]] = [deque() for _ in range(policy.streams)]
        self._failed: set[TicketId] = set()
        self._past_end: list[TicketId] = []  # out of order: tickets past the end of their stream, rising

    def resume(self, order: OutputBatch, turn: int, ended: tuple[int, ...]) -> None:
        """Continues after an earlier run that delivered the batches before ``order``. ``turn``: the worker that
        delivers next; ``ended``: workers whose streams have nothing left."""
        self.next, self._next_ticket, self._turn = order, TicketId(order), turn
        self._open.difference_update(ended)

    @property
    def ended(self) -> bool:
        """True when every stream has ended."""
        return not self._open

    # --- asking workers ---------------------------------------------------------------------------------------

    def _next_lease(self, undelivered: int, allowed: int) -> tuple[int, TicketSpan] | None:
        """Takes the next lease: returns its worker and tickets, or None.

        There is one if the window, which holds ``undelivered`` tickets, and memory (``allowed`` more) have room, or if
        the next batch comes from a worker that has not been asked for it.
        """
        if not self._open:
            return None
        worker = min(self._open, key=lambda each: (self._ahead(each), (each - self._turn) % self._workers))
        room = min(allowed, self._prefetch * len(self._open) * self.lease - undelivered)
        comes = self._lateness or undelivered > self._outstanding or self._ahead(worker)
        if room < self.lease and undelivered and comes:
            return None
        first, size = self._next_ticket, self.lease if room >= self.lease else 1
        self._next_ticket = TicketId(first + size)
        if self._lateness:
            self._turn = (worker + 1) % self._workers
        self._outstanding += size
        self._running[worker] += size
        self._leases[worker].append((first, self._next_ticket))
        return worker, (first, self._next_ticket)

    def _ahead(self, worker: int) -> int:
        """Returns the tickets that the worker runs; in order, plus its ready ones that wait for their turn."""
        return self._running[worker] + (0 if self._lateness else len(self._ready[worker]))

    def ask_for_more(self, work: Dispatcher, ledger: Ledger, undelivered: int) -> int:
        """Dispatches tickets to workers as far as the window, which holds ``undelivered`` batches, and memory allow.
        Returns how many tickets."""
        lanes, asked = [lane for lane in work.lanes.values() if not lane.is_device], 0
        while lanes:
            allowed = ledger.fits(self.lease, self._workers)
            found = self._next_lease(undelivered + asked, allowed)
            work.short_of_memory = allowed <= 0
            if found is None:
                break
            worker, (first, end) = found
            place = Place(Admitted(work.now, SourceBatch(first), 0, first, end - first))
            self._places.admit(place)
            asked += end - first
            work.intake.enter(place, None)
            work.ask(lanes[0], worker, place)
        return asked

    def advance(self, flight: Flight, event: Finished) -> None:
        """Handles a worker's report; the last ``ended`` of the new tickets are past the end of its stream."""
        first, worker, ended = flight.chunk.spans[0][0], flight.chunk.worker, event.ended
        lo, hi = TicketId(first + flight.done), TicketId(first + event.done)
        flight.done = event.done
        self._places.finish((lo, hi))
        self._running[worker] -= hi - lo
        if hi == self._leases[worker][0][1]:
            self._leases[worker].popleft()
        self._ready[worker].extend(serials(lo, TicketId(hi - ended)))
        self._failed.update(TicketId(first + offset) for offset in event.failed)
        self._outstanding -= ended
        if ended:
            self._open.discard(worker)
        for serial in serials(TicketId(hi - ended), hi) if self._lateness else ():
            insort(self._past_end, serial)

    # --- composition ------------------------------------------------------------------------------------------

    @property
    def awaited(self) -> Awaited | None:
        """The first ticket of the oldest unfinished lease of the worker whose turn it is, in strict order; None without
        one."""
        worker = self._worker_in_turn()
        return None if worker is None or not self._leases[worker] else Awaited(self._leases[worker][0], 1, True)

    @property
    def held_back(self) -> bool:
        """True when the next batch must be the oldest ticket, which is not ready; in strict order always False."""
        oldest = self._places.oldest
        if oldest is None or not self._lateness:
            return False
        return oldest.first - bisect(self._past_end, oldest.first) <= self.next - self._lateness

    def compose(self, eager: bool) -> Compose | None:
        """Takes the next batch; None if it is not ready. It is one ticket; in strict order, where tickets are delivered
        one by one (``Policy.items``), all that are ready in turn, at most a lease of each worker."""
        tickets = self._first_ready(eager) if self._lateness else self._ready_in_turn()
        if not tickets:
            return None
        order, self.next = self.next, OutputBatch(self.next + len(tickets))
        self._outstanding -= len(tickets)
        failed = tuple(self._failed.intersection(tickets)) if self._failed else ()
        self._failed.difference_update(failed)
        return Compose(order, tuple(joined(singles(tickets))), failed)

    def _first_ready(self, eager: bool) -> list[TicketId]:
        """Returns the oldest ready ticket, in a list, if it may overtake those before it; else an empty list."""
        ready = min((each for each in self._ready if each), key=lambda each: each[0], default=None)
        oldest = self._places.oldest
        if ready is None or (oldest is not None and oldest.first < ready[0] and (not eager or self.held_back)):
            return []
        return [ready.popleft()]

    def _ready_in_turn(self) -> list[TicketId]:
        """Takes the tickets that are ready in turn; a failed one by itself."""
        tickets: list[TicketId] = []
        most = self.lease * self._workers if self._runs else 1
        while len(tickets) < most and (worker := self._worker_in_turn()) is not None and (ready := self._ready[worker]):
            failed = ready[0] in self._failed
            if failed and tickets:
                break
            tickets.append(ready.popleft())
            self._turn = (worker + 1) % self._workers
            if failed:
                break
        return tickets

    def _worker_in_turn(self) -> int | None:
        """Returns the worker of the next batch in strict order; None when every stream has ended."""
        for step in range(self._workers):
            worker = (self._turn + step) % self._workers
            if self._ready[worker] or worker in self._open:
                return worker
        return None
