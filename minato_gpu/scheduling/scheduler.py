"""``Scheduler``: a pure state machine from events to instructions.

It reads no clock, starts nothing and touches no queue; the same object runs in production and in simulation. Three
decisions are made, each in its own files: what starts next on which lane (``dispatch`` with ``intake``, ``routing``,
``pacing``), what a batch consists of (``composition``), and what memory allows (``ledger``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from minato_gpu.samples import OutputBatch, TicketId
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.composition import Composition, FixedComposition, FreeComposition, ItemComposition
from minato_gpu.scheduling.dispatch import Dispatcher
from minato_gpu.scheduling.fetching import Part
from minato_gpu.scheduling.flights import Flight
from minato_gpu.scheduling.interference import DeviceInterference
from minato_gpu.scheduling.lane_state import LaneState
from minato_gpu.scheduling.ledger import Ledger
from minato_gpu.scheduling.places import Place, Places
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.spans import count, cut, number_at
from minato_gpu.scheduling.streams import Streams
from minato_gpu.scheduling.window_length import WindowLength


class Scheduler:
    """Schedules one loader run: ``handle`` takes an event and returns the instructions that follow from it. For one
    thread at a time."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._places = Places()
        places, lateness = self._places, policy.max_lateness
        self._streams = Streams(places, policy) if policy.streams else None
        self._composition: Composition
        if self._streams is not None:
            self._composition = self._streams
        elif policy.items:
            self._composition = ItemComposition(places)
        elif policy.fixed:
            self._composition = FixedComposition(places, lateness)
        else:
            self._composition = FreeComposition(places, lateness)
        self.window = WindowLength(policy.window_batches, policy.more_batches, policy.window_bytes, policy.per_group)
        self._ledger = Ledger(policy.budget_bytes)
        self._work = Dispatcher(policy, self._ledger, places, self.window)
        self._work.missing = lambda: self._composition.missing
        self._intake = self._work.intake
        self.fetching = self._work.fetching
        self._flights = self._work.flights
        self.flights: Mapping[int, Flight] = self._flights.by_number  # chunks in flight by number
        self.interference = DeviceInterference(policy.spares_device, policy.devices)
        self._sizes: dict[OutputBatch, int] = {}  # order -> samples, composed and not delivered
        self._undelivered = 0  # tickets in the window
        self._next_order = OutputBatch(0)  # order of the batch to deliver next
        self._asked = False  # the consumer waits and got no composed batch yet
        self._waits = False  # the consumer waits
        self._composed = 0  # samples composed and not delivered
        self._handlers: dict[type, Callable[[Any], None]] = {
            m.LaneOpened: self._intake.open,
            m.Admitted: self._admitted,
            m.Fetched: self._fetched,
            m.Resumed: self._resumed,
            m.Ended: self._ended,
            m.Inspected: self._inspected,
            m.Finished: self._finished,
            m.Lost: self._lost,
            m.Running: self._running,
            m.Revoked: self._flights.revoked,
            m.CollateNeeded: lambda event: self._work.jobs.append(event.order),
            m.Asked: self._asked_for,
            m.Delivered: self._delivered,
            m.Tick: lambda event: self._flights.postpone(),
        }

    # --- interface ---------------------------------------------------------------------------------------

    def note(self, event: m.Event) -> None:
        """Takes in an admission or a delivery; what follows from it is among the next event's instructions."""
        self._work.now = self._flights.now = event.time
        self._handlers[type(event)](event)

    def handle(self, event: m.Event) -> list[m.Instruction]:
        """Handles one event; returns the instructions to execute now, in this order."""
        work = self._work
        work.now = self._flights.now = event.time
        out = work.out = []
        self._handlers[type(event)](event)
        self._compose()
        work.consumer_starves = self._next_order not in self._sizes
        work.oldest = self._places.oldest
        work.samples_ready = self._ledger.ready_samples + self._composed
        if self._streams is not None:
            self._undelivered += self._streams.ask_for_more(work, self._ledger, self._undelivered)
        work.fill()
        if work.out_of_work and self.window.most and (self._waits or (self.window.saves and not self.window.idled)):
            self._note_out_of_work()
        if self.fetching.watches:
            self.fetching.observe(event.time, 0 if len(work.waiting) else work.idle_slots())
        return out

    @property
    def room(self) -> int:
        """Number of further tickets that the window admits; below 1: none."""
        return self.policy.window + self.window.extra * self._intake.pace.batch - self._undelivered

    @property
    def end(self) -> OutputBatch | None:
        """The order after the last batch, once every worker's own stream has ended; None before, or without streams."""
        ended = self._streams is not None and self._streams.ended
        return OutputBatch(self._next_order + self._undelivered) if ended else None

    @property
    def pending(self) -> bool:
        """True when tickets or collate jobs wait that a free lane would take."""
        return bool(self._work.jobs) or len(self._work.waiting) > 0

    @property
    def awaited(self) -> m.Awaited | None:
        """Samples that the next batch needs before it can be composed. None where it needs none, where they are not
        known, and where all lanes' leases end so soon that no extra wake-up is worth it."""
        oldest = self._places.oldest
        if oldest is None or self._next_order in self._sizes:
            return None
        for lane in self._work.lanes.values():
            if not (lane.is_device or lane.cheap):
                break
        else:
            return None
        if self._streams is not None and not self.policy.max_lateness:
            return self._streams.awaited
        if not self.policy.max_lateness or self._composition.held_back:
            return m.Awaited((oldest.first, oldest.end), 1 if self.policy.items else oldest.missing, True)
        return m.Awaited((oldest.first, self._intake.newest), max(1, self._composition.missing), False)

    @property
    def lane_costs(self) -> Mapping[str, m.LaneCosts]:
        """Measured costs of each lane that has prepared samples, in this run or the one before."""
        costs = {name: lane.costs for name, lane in self._work.lanes.items()}
        return {name: each for name, each in costs.items() if each.samples}

    def wake_at(self) -> float | None:
        """Returns when unfinished chunks should be reported (``Running``) and a ``Tick`` sent; None for never."""
        return self._flights.next_check()

    @property
    def idle_slots(self) -> int:
        """CPU slots that have nothing to do."""
        return self._work.idle_slots()

    @property
    def batches_ready(self) -> float:
        """Samples that are prepared and not delivered, in batches."""
        return (self._ledger.ready_samples + self._composed) / self._intake.pace.batch

    def stall_cause(self) -> str:
        """Returns why the consumer waits: the first that holds of "collate", "lateness", "memory", "sampler", "fetch",
        "slow sample" and "preparation"."""
        if self._next_order in self._sizes:
            return "collate"
        if self._composition.held_back:
            return "lateness"
        if self._work.short_of_memory:
            return "memory"
        if self._streams is not None:
            return "preparation"
        if self._places.oldest is None:
            return "sampler"
        if len(self.fetching) and not len(self._work.waiting) and self._work.idle_slots():
            return "fetch"
        overtaken = bool(self._sizes) and not self._places.oldest.waiting
        if overtaken or (not len(self._work.waiting) and self.room < 1):
            return "slow sample"
        return "preparation"

    # --- events -----------------------------------------------------------------------------------------

    def _resumed(self, event: m.Resumed) -> None:
        self._next_order = self._composition.next = event.order
        if self._streams is not None:
            self._streams.resume(event.order, event.turn, event.ended)

    def _admitted(self, event: m.Admitted) -> None:
        place = Place(event)
        self._composition.admit(place, event.size if event.batch is None else event.batch)
        if event.size == 0:
            return
        self._places.admit(place)
        if self._undelivered == 0 and self.policy.max_lateness and not self.policy.fixed:
            self._intake.cold = True
        self._undelivered += event.size
        self.window.grown = False
        self._intake.enter(place, event.follow)
        pace = self._intake.pace
        pace.ending = event.last
        if self.policy.items:
            pace.window = max(self.policy.window, self._undelivered)
        else:
            pace.batch = max(event.size, pace.batch)
        if event.fetched is None:
            self._queue(place, place.first, place.end)
        else:
            self._queue_fetched(self.fetching.admit(place, event.fetched))

    def _fetched(self, event: m.Fetched) -> None:
        self._queue_fetched(self.fetching.arrived(event.spans))
        for place, lo, hi in self.fetching.arrived(event.copies):
            self._intake.add_copies(lo, hi, place)

    def _queue_fetched(self, parts: Iterable[Part]) -> None:
        for part in parts:
            self._queue(*part)

    def _queue(self, place: Place, lo: TicketId, hi: TicketId) -> None:
        """Queues these tickets for lanes."""
        event = place.admitted
        cpu, device, between, first = event.cpu, event.device, event.between, event.first
        if cpu is None or not (device is not None or cpu[0] == cpu[0]):
            self._intake.add_unknown(lo, hi, place)
            return
        if hi - lo < event.size:
            these = slice(lo - first, hi - first)
            cpu = cpu[these]
            device = None if device is None else device[these]
            between = None if between is None else between[these]
        self._intake.add_costed(lo, place, cpu, device, between)

    def _ended(self, event: m.Ended) -> None:
        self._intake.pace.ending = True

    def _inspected(self, event: m.Inspected) -> None:
        flight = self._flights.retire(event.chunk)
        self._ledger.read(flight.size, event.nbytes)
        (part,) = flight.parts  # neighbours of one place
        self._intake.add_costed(part.lo, part.place, event.cpu, event.device, event.between, read=True)

    def _finished(self, event: m.Finished) -> None:
        flight = self.flights.get(event.chunk)
        if flight is None:
            return
        chunk = flight.chunk
        if chunk.kind == "collate":
            self._flights.retire(event.chunk)
            if not event.done:
                self._work.jobs.appendleft(chunk.order)
            return
        fresh = event.done - flight.done
        if fresh > 0:
            lane = self._work.lanes[chunk.lane]
            if lane.learns:
                self._learn(lane, flight, event)
            self._measured(lane, event, fresh)
            if flight.credit:
                self._flights.add_reported(flight, event.nbytes + event.handed_bytes)
            if event.handed:
                self._requeue_handed(flight, event)
            else:
                held = flight.held(range(flight.done, event.done))
                self._ledger.ready(fresh, event.nbytes, held, chunk.stop >= 0)
                if self._streams is None:
                    self._mark_ready(flight, event.done, event.failed)
                else:
                    self._streams.advance(flight, event)
                    self._ledger.ready_samples -= event.ended
                    self._undelivered -= event.ended
        if event.final:
            self._flights.retire(event.chunk)
            if event.done < flight.size:
                self._flights.give_back(flight, event.done, flight.size)

    def _measured(self, lane: LaneState, event: m.Finished, samples: int) -> None:
        """Takes in what ``samples`` samples took."""
        lane.measured(event.seconds, samples, event.own_s)
        window = self.window
        window.saves = lane.varied and not self.policy.max_lateness
        if lane.is_device:
            self.interference.worked(event.seconds)
        elif window.together and lane.helps:
            window.measured(lane.own_mean * self._intake.pace.batch, self._intake.group_s(lane.own_mean))

    def _learn(self, lane: LaneState, flight: Flight, event: m.Finished) -> None:
        """Updates the speed and the lease time of a remote lane."""
        flight.sample_s += event.seconds
        if event.final and flight.timed:
            lane.lease_took(event.time - flight.sent - flight.sample_s)
        if (each := self._intake.cpu_mean()) > 0:
            lane.compared(flight.predicted(flight.done, event.done, each), event.seconds)
            self._intake.measure()

    def _requeue_handed(self, flight: Flight, event: m.Finished) -> None:
        """Handles a report in which some samples have only reached a later stage."""
        handing, there = flight.chunk.stop >= 0, [offset for offset, _ in event.handed]
        self._ledger.handed(len(there), event.handed_bytes, flight.held(there), handing)
        ready = sorted({*range(flight.done, event.done)}.difference(there))
        if ready:
            self._ledger.ready(len(ready), event.nbytes, flight.held(ready), handing)
        for offset, stage in event.handed:
            self._flights.requeue_at_stage(flight, offset, stage)
            self._mark_ready(flight, offset, event.failed)
            flight.done = offset + 1
        self._mark_ready(flight, event.done, event.failed)

    def _lost(self, event: m.Lost) -> None:
        if event.lane in self._work.lanes:  # else it opens later in this run, with the slots left
            self._intake.resize(event.lane, -1)
        if event.chunk is None or event.chunk not in self.flights:
            return
        flight = self._flights.retire(event.chunk)
        chunk, done = flight.chunk, flight.done
        if chunk.kind == "collate":
            self._work.jobs.appendleft(chunk.order)
            return
        lo, hi = event.settled
        if lo < hi:
            if chunk.kind == "inspect":
                self._ledger.start(hi - lo)
            self._ledger.ready(hi - lo, event.nbytes, flight.held(range(lo, hi)), chunk.stop >= 0)
            self._flights.give_back(flight, done, lo)
            flight.done = done = lo
            self._mark_ready(flight, hi, event.failed)
            done = hi
        self._flights.give_back(flight, done, chunk.size)

    def _running(self, event: m.Running) -> None:
        instruction = self._flights.running(event)
        if instruction is not None:
            self._work.out.append(instruction)

    def _asked_for(self, event: m.Asked) -> None:
        self._asked = self._waits = self._next_order not in self._sizes
        if self._asked and self.interference.spare:
            self.interference.waited()
            self._update_price()

    def _delivered(self, event: m.Delivered) -> None:
        size = self._sizes.pop(event.order)
        self._undelivered -= size
        self._composed -= size
        self._ledger.ready_bytes = event.in_flight
        batches = size if self.policy.items else 1
        self._next_order = OutputBatch(event.order + batches)
        self._asked = self._waits = False
        if self.window.extra or self.window.wanted > 1:
            self.window.delivered(batches, *self._bytes())
        if self.window.idled:
            self.window.idled = False
            self.window.lengthen(*self._bytes())
        if self._streams is not None:
            self._streams.lease = event.lease
        if self.interference.stepped(event.step_s, self._intake.pace.cpu_tau * self._intake.pace.batch):
            self._update_price()

    def _update_price(self) -> None:
        """Passes the price of device work, and whether the device is spared, to the router."""
        router = self._intake.router
        router.price, router.spared = self.interference.price, self.interference.spare
        router.update(self._intake.rank)

    def _note_out_of_work(self) -> None:
        """Lengthens the window when CPU slots are idle and the epoch goes on."""
        if not (self._intake.pace.ending or len(self.fetching)) and self._work.idle_slots():
            self.window.out_of_work(self._waits, *self._bytes())

    def _bytes(self) -> tuple[int, float]:
        """Returns the bytes in the window, and those expected of a batch."""
        return self._ledger.in_flight, self._intake.pace.batch * self._ledger.sample_bytes

    # --- composition ------------------------------------------------------------------------------------

    def _mark_ready(self, flight: Flight, done: int, failed: tuple[int, ...]) -> None:
        """Marks the chunk's samples up to ``done`` as ready."""
        spans = flight.chunk.spans
        serials = tuple(number_at(spans, offset) for offset in failed)
        if flight.done or done < flight.size:
            spans = cut(spans, flight.done, done)
        flight.done, epoch = done, flight.parts[0].place.epoch  # a chunk has one epoch
        for span in spans:
            among = tuple(serial for serial in serials if span[0] <= serial < span[1])
            self._composition.finished(epoch, span, among, self._places.finish(span, among))

    def _compose(self) -> None:
        """Composes what can be composed; out of order only for a consumer that waits or has too few batches ready."""
        while True:
            eager = self._asked or len(self._sizes) < self.policy.compose_ahead
            batch = self._composition.compose(eager)
            if batch is None:
                return
            size = count(batch.spans)
            self._sizes[batch.order] = size
            self._composed += size
            self._intake.cold = False
            self._ledger.ready_samples -= size
            self._asked = False
            self._work.out.append(batch)
