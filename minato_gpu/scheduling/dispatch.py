"""What starts next on which lane: picks waiting tickets, gathers them into chunks, keeps what is under way.

A free lane takes the ticket of its side that must start first; with none there it steals the one nearest to the
threshold, if it would finish it sooner than its own side. Workers get *leases*: neighbouring tickets that are worth a
share of the time that the window takes (``pacing``), so that a dispatch costs little against its work. What a slow
sample holds up in its lease is taken back and given to others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import ceil

from minato_gpu.samples import OutputBatch, TicketId
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.fetching import Fetching
from minato_gpu.scheduling.flights import LATE, PATIENCE_S, Flight, Flights
from minato_gpu.scheduling.intake import LAID_DOWN_S, Intake
from minato_gpu.scheduling.lane_state import LaneState
from minato_gpu.scheduling.ledger import Ledger
from minato_gpu.scheduling.pacing import MANY_SLOTS
from minato_gpu.scheduling.places import Place, Places
from minato_gpu.scheduling.plans import END, Plan
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.waiting import Entry, Waiting
from minato_gpu.spans import TicketSpan, count, joined

LEAST_READS, MOST_READS = 8, 32  # samples whose headers are read at once
JOINED_BELOW_S = 20e-3  # beside what a costlier sample takes, laying it down counts for nothing
LATE_EVEN = 1.25  # as ``LATE``, for a lease of samples that cost much the same


class Dispatcher:
    """Waiting and running work of one loader run; ``out`` receives the instructions."""

    def __init__(self, policy: Policy, ledger: Ledger, places: Places) -> None:
        self.policy = policy
        self.lanes: dict[str, LaneState] = {}
        self.waiting = Waiting(policy.homes)
        self.fetching = Fetching(places, whole=policy.joins)
        self.jobs: deque[m.CollateNeeded] = deque()
        self.intake = Intake(policy, self.lanes, self.waiting)
        self.flights = Flights(policy, ledger, self.lanes, self.waiting, self.intake)
        self.samples_ready = 0  # ready and not delivered
        self.short_of_memory = False
        self.out_of_work = False  # a lane would take more, and nothing for it waits
        self.consumer_starves = True  # no batch is ready for it
        self.missing: Callable[[], int] = lambda: 0  # samples that a batch of what is ready still needs
        self.oldest: Place | None = None  # the oldest place that misses a sample
        self.out: list[m.Instruction] = []
        self.now = 0.0
        self._ledger = ledger
        self._next_chunk = 0

    # --- what is being fetched --------------------------------------------------------------------------------

    def _not_begun(self) -> int:
        """Samples of the oldest place that no lane has, whether their bytes are there or not."""
        return self.oldest.waiting + self.fetching.of_oldest if self.oldest is not None else 0

    def idle_slots(self) -> int:
        """Slots of CPU lanes that have nothing to do."""
        return sum(lane.idle for lane in self.lanes.values() if not lane.is_device)

    def note_idle(self) -> None:
        """Whether lanes have nothing to do, while places wait for bytes."""
        self.fetching.observe(self.now, 0 if len(self.waiting) else self.idle_slots())

    # --- lanes take work --------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Give work to every lane that would take some; to devices in rounds, the least loaded first."""
        takers = [lane for lane in self.lanes.values() if lane.wants_more(low=True)]
        while takers and (len(self.waiting) or self.jobs):
            lane = takers[0]
            if lane.is_device and len(takers) > 1:
                lane = min((each for each in takers if each.is_device), key=lambda each: each.load)
            if not (self._give(lane) and lane.wants_more()):
                takers.remove(lane)
        self.out_of_work = bool(takers)

    def _give(self, lane: LaneState) -> bool:
        """One dispatch for the lane; False where nothing is for it."""
        if self.jobs and lane.helps:
            job = self.jobs.popleft()
            self._dispatch(lane, "collate", (), (), job.seconds, job.order)
            return True
        if lane.wants_many and self.waiting.samples(lane.side) < lane.limits[0] // 2 and not self._is_held_up_by(lane):
            return False
        picked = self._pick(lane)
        return picked is not None and (self._send(lane, *picked) or self._send_oldest(lane, picked[0]))

    def _is_held_up_by(self, lane: LaneState) -> bool:
        """Whether the consumer waits, the lane is idle, and what waits on the lane's side holds the next batch up: the
        oldest sample that waits is among it, or so many are that they would complete a batch of what is ready."""
        if lane.load[0] or not self.consumer_starves:
            return False
        oldest = self.waiting.oldest()
        if oldest is not None and oldest.side == lane.side:
            return True
        return not self.policy.fixed and 0 < self.missing() <= self.waiting.samples(lane.side)

    def _send_oldest(self, lane: LaneState, refused: Entry) -> bool:
        """Memory refused an entry that should start early: the oldest one may still proceed."""
        entry = self.waiting.oldest()
        if entry is None or entry is refused or (entry.inspect and not lane.helps):
            return False
        if lane.is_device and (entry.device is None or entry.home != lane.home):
            return False
        return self._send(lane, entry, None if lane.is_device else self.intake.router.cut(entry))

    def _pick(self, lane: LaneState) -> tuple[Entry, Plan | None] | None:
        """The ticket that the free lane should take next, and where it should hand it over; or None."""
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
        return None if not self.policy.threshold else self.intake.router.steal(lane, self.intake.newest)

    def _slow_slots_taken(self) -> bool:
        """Whether slow work holds all CPU slots but one (of one slot none is reserved)."""
        slots = slow = 0
        for lane in self.lanes.values():
            if not lane.is_device:
                slots, slow = slots + lane.slots, slow + len(lane.slow)
        return slots > 1 and slow >= slots - 1

    def _first(self, lane: LaneState, patience: float = 0.0) -> Entry | None:
        """The ticket on the lane's side that should start first, and that it may have."""
        if lane.is_device and lane.side == m.CPU and self.policy.pins:
            return self.waiting.first_of(lane.home)
        entry = self.waiting.first(lane.side, patience)
        if entry is not None and entry.inspect and not (lane.helps or lane.is_device):
            return self.waiting.first_inspected()
        return entry

    def _pick_for_reader(self) -> tuple[Entry, Plan | None] | None:
        """For a CPU lane that only reads: what is to be read."""
        reading = self.waiting.first(m.CPU)
        return (reading, None) if reading is not None and reading.inspect else None

    def _send(self, lane: LaneState, entry: Entry, plan: Plan | None) -> bool:
        """Dispatch a chunk that begins with ``entry``, up to the plan's split; False when memory forbids it."""
        if entry.inspect:
            part = entry.part(entry.lo, min(entry.hi, TicketId(entry.lo + self._reads_at_once(entry))))
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

    def _reads_at_once(self, entry: Entry) -> int:
        """How many samples a lane reads the headers of in one dispatch: many cost the training process little, but what
        the consumer waits for, and the last that wait, are shared out to all slots."""
        if self.consumer_starves and entry.place is self.oldest:
            return LEAST_READS
        return max(LEAST_READS, min(MOST_READS, self.waiting.unread // (2 * max(self.intake.pace.cpu_slots, 1))))

    def _gather(self, lane: LaneState, entry: Entry, plan: Plan | None) -> tuple[list[Entry], float]:
        """Take tickets for one dispatch from ``waiting``: as many as are worth its round trip."""
        limit, target = self._worth(lane, entry) if plan is None else lane.limits
        target *= lane.speed  # below, seconds are those of its kind
        parts: list[Entry] = []
        total, seconds = 0, 0.0
        following: Entry | None = entry
        while following is not None:
            each = self._each(lane, following) if plan is None else plan.cpu
            if total and (following.inspect or seconds + each > target):
                break
            size = following.hi - following.lo
            if following.place is not entry.place and 2 * seconds > target < seconds + following.seconds(size, each):
                break  # with a place, rather than a little way into the next one
            count = min(size, limit - total)
            if self.policy.joins and total and seconds + following.seconds(count, each) > target:
                break  # the next place may go whole to another slot
            if self.policy.joins and self._goes_whole(lane, following, each):
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

    def _worth(self, lane: LaneState, entry: Entry) -> tuple[int, float]:
        """The most samples of a dispatch that begins with ``entry``, and its target in predicted seconds.

        What the batch that the consumer waits for misses, and nobody has started, is shared out to all slots, in leases
        that become shorter towards its end (guided self-scheduling; Polychronopoulos and Kuck 1987). So is what is left
        of an epoch.
        """
        limit, target = lane.limits
        if lane.is_device:
            return limit, target
        pace = self.intake.pace
        each, shares = lane.typical, 2 * max(pace.cpu_capacity, 1) / lane.speed
        window = self._ledger.within(self.intake.pace.window)
        lease = pace.lease_s(each, window, even=lane.even)
        if self.consumer_starves and entry.place is self.oldest:
            count = entry.place.waiting
            equal_s = ceil(pace.batch / shares) * (entry.cpu or each) if lane.even else 0.0
            lease = min(lease, max(equal_s, count * each / shares))
        left = self.intake.left(entry.lo)
        if left is None and pace.cpu_slots < MANY_SLOTS:  # else the window shows the end in time
            said = self.intake.left_as_said(entry.lo)
            lease = lease if said is None else min(lease, said * lane.mean / (shares / 2))
        if left is not None:
            lease = min(lease, left * lane.mean / shares)
        return limit, max(target, lease)

    def _goes_whole(self, lane: LaneState, entry: Entry, each: float) -> bool:
        """Whether one slot takes all of the entry's place, and joins it.

        It does where samples cost less than laying them down would. Costlier ones are shared out where the consumer
        waits for this very place, and where there are fewer places than would keep all slots at work.
        """
        place, count = entry.place, entry.hi - entry.lo
        if lane.is_device or (entry.lo, entry.hi) != (place.first, place.end):
            return False
        seconds = entry.seconds(count, entry.cpu or each)
        slots = self.intake.pace.cpu_slots
        if slots < 2 or seconds <= LAID_DOWN_S * count:
            return True
        if place is self.oldest or seconds >= JOINED_BELOW_S * count:
            return False
        left = self.intake.left(entry.lo)
        if left is None or self.intake.newest > entry.lo + left:  # a job would wait for leases of the next epoch
            left = self._ledger.within(self.intake.pace.window)
        return 2 * slots * count <= left

    def _each(self, lane: LaneState, entry: Entry) -> float:
        """Predicted seconds of its kind for each sample; of one that is not known, what few of the others exceed."""
        return lane.predict(entry) if lane.is_device or entry.cpu is not None else lane.typical * lane.speed

    def _next_after(self, lane: LaneState, entry: Entry) -> Entry | None:
        """What may travel in the same chunk: for a device the next of its side, else the contiguous cheap run.

        A chunk has one epoch, and with it one seed.
        """
        following = self._first(lane) if lane.is_device else self.waiting.at(entry.hi)
        if self.policy.inspect and not lane.is_device and (following is None or following.side != m.CPU):
            following = self._first(lane)  # a device has the neighbours
        if following is None or entry.place.epoch != following.place.epoch:
            return None
        if lane.is_device:
            return following if following.device is not None else None
        return following if following.side == m.CPU and not following.slow else None

    def _within_budget(self, entry: Entry, count: int, taken: int, *, handing: bool) -> int:
        """How many of ``count`` tickets memory allows (P4); ``handing``: they are to be handed over to another lane.

        What the oldest place still needs is set aside for it. And while no batch is ready for the consumer, its oldest
        sample may always proceed: only a delivery gives memory back.
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
        """Have this worker of the lane go on with its own stream, for the tickets of the place."""
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
        flight.times = bool(lane.learns and lane.idle)
        lane.add(chunk, len(parts) == 1 and parts[0].slow)
        self._ledger.promised += credit
        if kind in ("run", "next"):
            size = flight.size
            self._ledger.start(size, stop >= 0)
            if size > 1 and not lane.is_device:
                late = LATE_EVEN if lane.even else LATE
                self.flights.look_again(flight, max(PATIENCE_S, late * seconds + lane.backlog_s()))
            elif not lane.is_device and stop == END and self.intake.router.may_rescue(parts[0]):
                self.flights.look_again(flight, max(PATIENCE_S, LATE * seconds))
        self.out.append(m.Dispatch(chunk))
        return flight


def _split(plan: Plan | None) -> int:
    return END if plan is None else plan.split
