"""``Dispatcher``: decides which waiting tickets start next on which lane, and groups them into chunks.

A free lane takes the ticket on its side that must start first. If there is none, it steals the ticket nearest to the
routing threshold, provided it would finish it sooner than its own side. CPU workers get *leases*: neighbouring tickets
worth a share of the window's time (``pacing``), so that a dispatch costs little against its work. What a slow sample
holds up in a lease is revoked and given to others (``flights``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import ceil

from minato_gpu.samples import OutputBatch, TicketId
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.fetching import Fetching
from minato_gpu.scheduling.flights import LATE, PATIENCE_S, Flight, Flights
from minato_gpu.scheduling.intake import STORE_S, Intake
from minato_gpu.scheduling.lane_state import LaneState
from minato_gpu.scheduling.ledger import Ledger
from minato_gpu.scheduling.pacing import MANY_SLOTS
from minato_gpu.scheduling.places import Place, Places
from minato_gpu.scheduling.plans import END, Plan
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.spans import TicketSpan, count, joined
from minato_gpu.scheduling.waiting import Entry, Waiting
from minato_gpu.scheduling.window_length import WindowLength

LEAST_READS, MOST_READS = 8, 32  # samples whose headers are read at once
JOINED_BELOW_S = 20e-3  # for costlier samples the time to store them is negligible
LATE_UNIFORM = 1.25  # ``LATE`` for a lease of samples of nearly equal cost


class Dispatcher:
    """Holds the waiting and running work of one loader run, and dispatches it; ``out`` receives the instructions."""

    def __init__(self, policy: Policy, ledger: Ledger, places: Places, window: WindowLength) -> None:
        self.policy = policy
        self.lanes: dict[str, LaneState] = {}
        self.waiting = Waiting(policy.homes)
        self.fetching = Fetching(places, whole=policy.joins and not policy.shares)
        self.jobs: deque[OutputBatch] = deque()  # batches that a worker is to join
        self.intake = Intake(policy, self.lanes, self.waiting)
        self.flights = Flights(policy, ledger, self.lanes, self.waiting, self.intake)
        self.samples_ready = 0  # ready and not delivered
        self.short_of_memory = False
        self.out_of_work = False  # a lane wants more and nothing waits for it
        self.consumer_starves = True  # no batch is ready
        self.missing: Callable[[], int] = lambda: 0  # samples that the next batch still needs
        self.oldest: Place | None = None  # the oldest incomplete place
        self.out: list[m.Instruction] = []
        self.now = 0.0
        self._ledger = ledger
        self._window = window
        self._next_chunk = 0

    # --- waiting for bytes --------------------------------------------------------------------------------

    def _not_begun(self) -> int:
        """Returns how many samples of the oldest place no lane has, whether their bytes have arrived or not."""
        return self.oldest.waiting + self.fetching.of_oldest if self.oldest is not None else 0

    def idle_slots(self) -> int:
        """Returns the CPU slots that have nothing to do."""
        return sum(lane.idle for lane in self.lanes.values() if not lane.is_device)

    # --- lanes take work --------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Dispatches work to every lane that wants some; to devices in rounds, the least loaded first."""
        takers = [lane for lane in self.lanes.values() if lane.wants_more(low=True)]
        while takers and (len(self.waiting) or self.jobs):
            lane = takers[0]
            if lane.is_device and len(takers) > 1:
                lane = min((each for each in takers if each.is_device), key=lambda each: each.load)
            if not (self._dispatch_one(lane) and lane.wants_more()):
                takers.remove(lane)
        self.out_of_work = bool(takers)

    def _dispatch_one(self, lane: LaneState) -> bool:
        """Dispatches one chunk to the lane; returns False if there is none for it, or memory forbids it."""
        if self.jobs and lane.helps:
            self._dispatch(lane, "collate", (), (), 0.0, self.jobs.popleft())
            return True
        if (
            lane.wants_many
            and self.waiting.samples[lane.home] < lane.limits[0] // 2
            and not self._blocks_next_batch(lane)
        ):
            return False
        picked = self._pick(lane)
        return picked is not None and (self._send(lane, *picked) or self._send_oldest(lane, picked[0]))

    def _blocks_next_batch(self, lane: LaneState) -> bool:
        """Returns True when the consumer waits, the lane is idle, and tickets on its side block the next batch: they
        include the oldest waiting ticket, or would complete a batch of what is ready."""
        if lane.load[0] or not self.consumer_starves:
            return False
        oldest = self.waiting.oldest()
        if oldest is not None and oldest.side == lane.home:
            return True
        return not self.policy.fixed and 0 < self.missing() <= self.waiting.samples[lane.home]

    def _send_oldest(self, lane: LaneState, refused: Entry) -> bool:
        """Dispatches the oldest waiting entry after memory has ``refused`` another; returns whether it did."""
        entry = self.waiting.oldest()
        if entry is None or entry is refused or (entry.inspect and not lane.helps):
            return False
        if lane.is_device and (entry.device is None or entry.home != lane.home):
            return False
        return self._send(lane, entry, None if lane.is_device else self.intake.router.cut(entry))

    def _pick(self, lane: LaneState) -> tuple[Entry, Plan | None] | None:
        """Returns the ticket that the free lane should take next, with the plan by which it hands it over; or None."""
        if not (lane.is_device or self.policy.cpu_runs):
            return self._pick_for_reader() if lane.helps else None
        patience = 0.0
        if self.policy.max_lateness and not lane.is_device:
            patience = self.intake.pace.defer(self.samples_ready)
            if self.policy.reserve and self._slow_slots_taken():
                patience = float("inf")
        entry = self._first(lane, patience)
        if entry is not None and not (lane.is_device and entry.device is None):
            return entry, None if lane.is_device else self.intake.router.cut(entry)
        return self.intake.router.steal(lane, self.intake.newest)

    def _slow_slots_taken(self) -> bool:
        """Returns True when slow samples hold all CPU slots but one (a single slot is not reserved)."""
        slots = slow = 0
        for lane in self.lanes.values():
            if not lane.is_device:
                slots, slow = slots + lane.slots, slow + len(lane.slow)
        return slots > 1 and slow >= slots - 1

    def _first(self, lane: LaneState, patience: float = 0.0) -> Entry | None:
        """Returns the ticket on the lane's side that should start first and that the lane may have."""
        entry = self.waiting.first(lane.home, patience)
        if entry is not None and entry.inspect and not (lane.helps or lane.is_device):
            return self.waiting.first_inspected()
        return entry

    def _pick_for_reader(self) -> tuple[Entry, Plan | None] | None:
        """Returns the next ticket to inspect, for a CPU lane that only reads."""
        reading = self.waiting.first(m.CPU)
        return (reading, None) if reading is not None and reading.inspect else None

    def _send(self, lane: LaneState, entry: Entry, plan: Plan | None) -> bool:
        """Dispatches a chunk that begins with ``entry``, to be handed over at the plan's split; returns False when
        memory forbids it."""
        if entry.inspect:
            part = entry.part(entry.lo, min(entry.hi, TicketId(entry.lo + self._inspections_at_once(entry))))
            self.waiting.take(entry, part.hi - part.lo)
            self._dispatch(lane, "inspect", ((part.lo, part.hi),), (part,), 0.0)
            return True
        parts, seconds = self._gather(lane, entry, plan)
        if not parts:
            return False
        one = parts[0].lo, parts[0].hi
        spans = (one,) if len(parts) == 1 else tuple(joined([(part.lo, part.hi) for part in parts]))
        flight = self._dispatch(lane, "run", spans, parts, seconds, stop=_split(plan))
        if plan is not None:
            self.flights.promise(
                flight, sum(found.device for part in parts for found in part.between if found[0] == plan[0])
            )
        return True

    def _inspections_at_once(self, entry: Entry) -> int:
        """Returns how many headers a lane reads in one dispatch: many, unless the consumer waits for them or few are
        left, which are shared among all slots."""
        if self.consumer_starves and entry.place is self.oldest:
            return LEAST_READS
        return max(LEAST_READS, min(MOST_READS, self.waiting.unread // (2 * max(self.intake.pace.cpu_slots, 1))))

    def _gather(self, lane: LaneState, entry: Entry, plan: Plan | None) -> tuple[list[Entry], float]:
        """Takes tickets for one dispatch from ``waiting``, as many as are worth its round trip. Returns them, none if
        memory forbids it, with their predicted seconds on this lane."""
        limit, target = self._lease_limits(lane, entry) if plan is None else lane.limits
        target *= lane.speed  # below, seconds are those of a slot of this host
        parts: list[Entry] = []
        total, seconds = 0, 0.0
        following: Entry | None = entry
        while following is not None:
            each = self._seconds_each(lane, following) if plan is None else plan.cpu
            if total and (following.inspect or seconds + each > target):
                break
            size = following.hi - following.lo
            if following.place is not entry.place and 2 * seconds > target < seconds + following.seconds(size, each):
                break  # end with the place rather than early in the next one
            count = min(size, limit - total)
            if self.policy.joins and total and seconds + following.seconds(count, each) > target:
                break  # another slot may take the next place as a whole
            if self.policy.joins and self._takes_whole_place(lane, following, each):
                count = size
            elif count > 1:
                count = min(count, following.within(target - seconds, each))
            count = self._within_budget(following, count, total, handing=plan is not None)
            if count == 0:
                break
            whole = count == size
            taken = following.seconds(count, each)
            self.waiting.take(following, count)
            parts.append(following if whole else following.part(following.lo, TicketId(following.lo + count)))
            total += count
            seconds += taken
            if total >= limit or not whole or each == 0.0:
                break
            following = self._next_after(lane, following)
            if following is not None and (plan is not None or following.steps is not None) and not lane.is_device:
                before, plan = plan, self.intake.router.cut(following)
                if _split(before) != _split(plan):
                    break
        return parts, seconds / lane.speed

    def _lease_limits(self, lane: LaneState, entry: Entry) -> tuple[int, float]:
        """Returns the most samples of a dispatch that begins with ``entry``, and its target in predicted seconds.

        The missing samples of the batch that the consumer waits for are divided among all slots, in leases that shrink
        towards its end (guided self-scheduling; Polychronopoulos and Kuck 1987). So is what is left of an epoch.
        """
        limit, target = lane.limits
        if lane.is_device:
            return limit, target
        pace = self.intake.pace
        each, shares = lane.typical, 2 * max(pace.cpu_capacity, 1) / lane.speed
        window = self._ledger.within(self.intake.pace.window)
        lease = pace.lease_s(each, window, uniform=lane.uniform)
        if self._window.together and lane.mean:
            group_s = self._window.together * pace.batch * (entry.cpu or each or lane.mean)
            target = min(target, group_s)
            lease = max(lease, group_s) if self._window.together > 1 else lease
        if self.consumer_starves and entry.place is self.oldest:
            count = entry.place.waiting
            equal_s = ceil(pace.batch / shares) * (entry.cpu or each) if lane.uniform else 0.0
            lease = min(lease, max(equal_s, count * each / shares))
        left = self.intake.left(entry.lo)
        if left is None and pace.cpu_slots < MANY_SLOTS:  # with many slots the window shows the end in time
            said = self.intake.left_by_length(entry.lo)
            lease = lease if said is None else min(lease, said * lane.mean / (shares / 2))
        if left is not None:
            lease = min(lease, left * lane.mean / shares)
        return limit, max(target, lease)

    def _takes_whole_place(self, lane: LaneState, entry: Entry, each: float) -> bool:
        """Returns True when one slot takes all of the entry's place and collates it.

        It does so where samples cost less than storing them for another worker. Costlier ones are divided where the
        consumer waits for this place, or fewer places are left than would keep all slots busy.
        """
        place, count = entry.place, entry.hi - entry.lo
        if lane.is_device or (entry.lo, entry.hi) != (place.first, place.end):
            return False
        seconds = entry.seconds(count, entry.cpu or each)
        slots = self.intake.pace.cpu_slots
        if slots < 2 or seconds <= STORE_S * count:
            return True
        if place is self.oldest or seconds >= JOINED_BELOW_S * count:
            return False
        left = self.intake.left(entry.lo)
        if left is None or self.intake.newest > entry.lo + left:  # collating would wait for leases of the next epoch
            left = self._ledger.within(self.intake.pace.window)
        return 2 * slots * count <= left

    def _seconds_each(self, lane: LaneState, entry: Entry) -> float:
        """Returns the predicted seconds of each sample of the entry on this kind of lane, in a slot of this host. Where
        unknown: on a device the mean, on a CPU what nine in ten samples stay below."""
        return lane.predict(entry) if lane.is_device or entry.cpu is not None else lane.typical * lane.speed

    def _next_after(self, lane: LaneState, entry: Entry) -> Entry | None:
        """Returns the entry that may join the same chunk: for a device the next of its side, else the contiguous fast
        one.

        A chunk belongs to one epoch, and so has one seed.
        """
        following = self._first(lane) if lane.is_device else self.waiting.at(entry.hi)
        elsewhere = self.policy.inspect or self.fetching.watches  # a device has the neighbours, or they are being read
        if elsewhere and not lane.is_device and (following is None or following.side != m.CPU):
            following = self._first(lane)
        if following is None or entry.place.epoch != following.place.epoch:
            return None
        if lane.is_device:
            return following if following.device is not None else None
        return following if following.side == m.CPU and not following.slow else None

    def _within_budget(self, entry: Entry, count: int, taken: int, *, handing: bool) -> int:
        """Returns how many of ``count`` tickets memory allows (P4), and sets ``short_of_memory``.

        ``handing``: they will be handed over to another lane.

        Memory for the rest of the oldest place is reserved. While no batch is ready for the consumer, its oldest sample
        may always proceed, because only a delivery frees memory.
        """
        if self._ledger.budget is None:
            return count
        reserved = 0 if entry.place is self.oldest else self._not_begun()
        slots = self.intake.pace.cpu_slots or 1
        allowed = self._ledger.fits(count, slots, handing=handing, taken=taken, reserved=reserved)
        self.short_of_memory = allowed <= 0
        if allowed > 0 or taken:
            return max(allowed, 0)
        running = (
            part.lo for flight in self.flights.by_number.values() if flight.chunk.kind == "run" for part in flight.parts
        )
        must = self.consumer_starves and self.waiting.oldest() is entry
        return int(must and entry.lo < min(running, default=entry.hi))

    def ask(self, lane: LaneState, worker: int, place: Place) -> None:
        """Dispatches the tickets of a place to ``worker``, which takes as many samples from its own stream."""
        span, size = (place.first, place.end), place.missing
        parts = (Entry(*span, place),)
        self._dispatch(lane, "next", (span,), parts, size * lane.mean, worker=worker)

    def _dispatch(
        self,
        lane: LaneState,
        kind: str,
        spans: tuple[TicketSpan, ...],
        parts: Sequence[Entry],
        seconds: float,
        order: OutputBatch = m.NO_BATCH,
        stop: int = END,
        worker: int = -1,
    ) -> Flight:
        credit = 0
        if self._ledger.budget is not None and kind == "run" and not lane.is_device:
            credit = self._ledger.credit(count(spans), handing=stop >= 0)
        chunk = m.Chunk(self._next_chunk, lane.name, kind, spans, seconds, order, stop, credit, worker)
        self._next_chunk += 1
        flight = self.flights.by_number[chunk.number] = Flight(chunk, parts, self.now)
        flight.timed = bool(lane.learns and lane.idle)
        lane.add(chunk, len(parts) == 1 and parts[0].slow)
        self._ledger.promised += credit
        if kind in ("run", "next"):
            size = flight.size
            self._ledger.start(size, stop >= 0)
            if size > 1 and not lane.is_device:
                late = LATE_UNIFORM if lane.uniform else LATE
                self.flights.check_after(flight, max(PATIENCE_S, late * seconds + lane.backlog_s()))
            elif not lane.is_device and stop == END and self.intake.router.may_rescue(parts[0]):
                self.flights.check_after(flight, max(PATIENCE_S, LATE * seconds))
        self.out.append(m.Dispatch(chunk))
        return flight


def _split(plan: Plan | None) -> int:
    return END if plan is None else plan.split
