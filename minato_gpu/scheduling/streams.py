"""Iterable data sets: every worker owns a stream, and each ticket is a batch of one worker's stream.

In order, batches come in PyTorch's order: one of each worker in turn, leaving out workers whose streams have ended.
Out of order they come by completion, none more than ``max_lateness`` batches after its turn. A slow stream delays
itself alone, within that. The order of delivery does not depend on when the end of a stream becomes known: the tickets
that find it drop out.
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
from minato_gpu.spans import TicketSpan, joined, serials, singles


class Streams(Composition):
    """Decides which worker is asked for batches of its stream next, and in which order they are delivered.

    ``lease``: batches that a worker is asked for at once.
    """

    def __init__(self, places: Places, policy: Policy) -> None:
        super().__init__(places, policy.max_lateness)
        self.lease = 1
        self._workers, self._prefetch = policy.streams, policy.window // policy.streams
        self._runs = policy.items
        self._open = set(range(policy.streams))  # workers whose streams have not ended
        self._turn = 0
        self._next_ticket = TicketId(0)
        self._outstanding = 0  # tickets that are in no batch
        # by worker: leases that are not finished, tickets in them, and tickets that are ready and in no batch
        self._leases: list[deque[TicketSpan]] = [deque() for _ in range(policy.streams)]
        self._running = [0] * policy.streams
        self._ready: list[deque[TicketId]] = [deque() for _ in range(policy.streams)]
        self._failed: set[TicketId] = set()
        self._dropped: list[TicketId] = []  # out of order, rising: those that found the end of their stream

    def resume(self, order: OutputBatch, turn: int, ended: tuple[int, ...]) -> None:
        """An earlier run has delivered the batches before ``order``, and streams of workers ``ended`` to their end."""
        self.next, self._next_ticket, self._turn = order, TicketId(order), turn
        self._open.difference_update(ended)

    @property
    def ended(self) -> bool:
        """Whether every stream has ended."""
        return not self._open

    # --- asking workers ---------------------------------------------------------------------------------------

    def _next_lease(self, undelivered: int, allowed: int) -> tuple[int, TicketSpan] | None:
        """The next worker and its tickets, if the window, which holds ``undelivered`` of them, has room for more, and
        memory has for ``allowed``; or if the next batch is one that nobody has been asked for."""
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
        """Tickets that the worker has; in order, and those that wait for others' turns."""
        return self._running[worker] + (0 if self._lateness else len(self._ready[worker]))

    def ask_for_more(self, work: Dispatcher, ledger: Ledger, undelivered: int) -> int:
        """Have workers go on with their streams, as far as the window, which holds ``undelivered`` batches, and memory
        allow. Returns for how many batches they were asked."""
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
        """A worker has come further in its stream; the last tickets found the end of it where that has ``ended``."""
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
            insort(self._dropped, serial)

    # --- composition ------------------------------------------------------------------------------------------

    @property
    def awaited(self) -> Awaited | None:
        """In order, what the next batch needs: the first ticket of a lease of the worker whose turn it is."""
        worker = self._in_turn()
        return None if worker is None or not self._leases[worker] else Awaited(self._leases[worker][0], 1, True)

    @property
    def held_back(self) -> bool:
        """Whether the next batch must be the oldest ticket, which is not ready."""
        oldest = self._places.oldest
        if oldest is None or not self._lateness:
            return False
        return oldest.first - bisect(self._dropped, oldest.first) <= self.next - self._lateness

    def compose(self, eager: bool) -> Compose | None:
        """The next batch, or None; in order as many as are ready, if they are delivered one by one."""
        tickets = self._late(eager) if self._lateness else self._run()
        if not tickets:
            return None
        order, self.next = self.next, OutputBatch(self.next + len(tickets))
        self._outstanding -= len(tickets)
        failed = tuple(self._failed.intersection(tickets)) if self._failed else ()
        self._failed.difference_update(failed)
        return Compose(order, tuple(joined(singles(tickets))), failed)

    def _late(self, eager: bool) -> list[TicketId]:
        """The first ticket that is ready, if it may overtake those before it."""
        ready = min((each for each in self._ready if each), key=lambda each: each[0], default=None)
        oldest = self._places.oldest
        if ready is None or (oldest is not None and oldest.first < ready[0] and (not eager or self.held_back)):
            return []
        return [ready.popleft()]

    def _run(self) -> list[TicketId]:
        """Those that are ready, in turn; one that has failed by itself."""
        tickets: list[TicketId] = []
        most = self.lease * self._workers if self._runs else 1
        while len(tickets) < most and (worker := self._in_turn()) is not None and (ready := self._ready[worker]):
            failed = ready[0] in self._failed
            if failed and tickets:
                break
            tickets.append(ready.popleft())
            self._turn = (worker + 1) % self._workers
            if failed:
                break
        return tickets

    def _in_turn(self) -> int | None:
        """In order, the worker that the next batch comes from; None where every stream has ended."""
        for step in range(self._workers):
            worker = (self._turn + step) % self._workers
            if self._ready[worker] or worker in self._open:
                return worker
        return None
