"""The scheduler: a pure state machine from events to instructions.

It reads no clock, starts nothing and touches no queue; the same object runs in production and in simulation.
Three decisions are taken here, each on the state that its own file keeps: what starts next on which lane
(``waiting``, ``routing``, ``lane_state``), what a batch consists of (``places``), and what is taken back.

Policy, in short. Samples of unlike cost are routed by the window's threshold; a free lane takes the ticket of
its side that must start first, which is the oldest unless a predicted-slow one needs the head start; with none
there it steals the one nearest to the threshold, if it would finish it sooner. Cheap samples are dispatched by
the chunk, so that a dispatch is worth ``chunk_s`` seconds of work; what a slow sample holds up in its chunk is
taken back and given to others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.lane_state import LaneState
from minato_gpu.scheduling.places import FixedComposition, FreeComposition, Place, Places
from minato_gpu.scheduling.routing import threshold
from minato_gpu.scheduling.waiting import DEVICE, Entry, Waiting

_INSPECT_CHUNK = 8
_PATIENCE_S = 5e-3  # a chunk is not looked into before it has run this long


class Scheduler:
    """One loader run. ``handle`` takes an event and returns the instructions that follow from it."""

    def __init__(self, policy: m.Policy) -> None:
        self.policy = policy
        self._lanes: dict[str, LaneState] = {}
        self._places = Places()
        composition = FixedComposition if policy.fixed else FreeComposition
        self._composition = composition(self._places, policy.max_lateness)
        self._waiting = Waiting()
        self._jobs: deque[m.CollateNeeded] = deque()
        self._inflight: dict[int, m.Chunk] = {}
        self._done: dict[int, int] = {}  # chunk -> samples reported ready
        self._started: dict[int, float] = {}  # chunk of several samples -> when it may be looked into next
        self._sizes: dict[int, int] = {}  # order -> samples, until delivered
        self._next_chunk = 0
        self._undelivered = 0
        self._ready_bytes: dict[int, int] = {}
        self._bytes = 0
        self._sample_bytes = 0.0
        self._running_samples = 0
        self._threshold = float("inf")
        self._since_threshold = 0
        self._composed = 0
        self._asked = False
        self._short_of_memory = False
        self._out: list[m.Instruction] = []
        self._now = 0.0
        self._handlers: dict[type, Callable[[Any], None]] = {
            m.LaneOpened: self._lane_opened,
            m.Admitted: self._admitted,
            m.Ended: lambda event: None,
            m.Inspected: self._inspected,
            m.Finished: self._finished,
            m.Running: self._running,
            m.Revoked: self._revoked,
            m.CollateNeeded: self._collate_needed,
            m.Asked: self._was_asked,
            m.Delivered: self._delivered,
            m.Tick: lambda event: None,
        }

    # --- the face ---------------------------------------------------------------------------------------

    def handle(self, event: m.Event) -> list[m.Instruction]:
        """Take one event; return what to do now, in this order."""
        self._now = event.time
        out = self._out = []
        self._handlers[type(event)](event)
        self._fill()
        return out

    @property
    def room(self) -> int:
        """How many more tickets the window admits."""
        return self.policy.window - self._undelivered

    @property
    def pending(self) -> bool:
        """Whether tickets or jobs wait that a lane would take as soon as it is free."""
        return bool(self._jobs) or len(self._waiting) > 0

    @property
    def bytes_in_flight(self) -> int:
        """Host bytes of samples ready and not delivered, plus what the running ones are expected to need."""
        return self._bytes + int(self._running_samples * self._sample_bytes)

    def wake_at(self) -> float | None:
        """When unfinished chunks should be reported (``Running``) and a ``Tick`` sent; None for never."""
        return min(self._started.values(), default=None)

    def stall_cause(self) -> str:
        """Why the consumer waits, in one word or two: the first of these that holds."""
        if self._composed > 0:
            return "collate"
        if self._composition.held_back:
            return "lateness"
        if self._short_of_memory:
            return "memory"
        if self._places.oldest is None:
            return "sampler"
        if not len(self._waiting) and self.room < 1:
            return "slow sample"
        return "preparation"

    # --- events -----------------------------------------------------------------------------------------

    def _lane_opened(self, event: m.LaneOpened) -> None:
        lane = self._lanes.get(event.lane)
        if lane is None:
            lane = self._lanes[event.lane] = LaneState(event.lane, self.policy)
        lane.slots += event.slots
        self._route()

    def _admitted(self, event: m.Admitted) -> None:
        place = Place(event.place, event.epoch, event.first, event.size)
        self._places.admit(place)
        self._composition.admit(place)
        self._undelivered += event.size
        end = event.first + event.size
        if event.cpu is None:
            entry = Entry(event.first, end)
            entry.inspect = self.policy.inspect and any(lane.is_device for lane in self._lanes.values())
            self._waiting.add(entry)
            return
        self._add_costed([(event.first, end)], event.cpu, event.device)

    def _inspected(self, event: m.Inspected) -> None:
        chunk = self._retire(event.chunk)
        self._add_costed(chunk.spans, event.cpu, event.device)

    def _add_costed(self, spans: Sequence[m.Span], cpu: Sequence[float], device: Sequence[float] | None) -> None:
        """Queue tickets with known costs: neighbours that are cheap as one entry, costly ones alone."""
        cheap = self.policy.chunk_s / 4
        lane = self._cpu
        at = 0
        for lo, hi in spans:
            run: list[float] = []
            for serial in range(lo, hi):
                cost, other = cpu[at], None if device is None else device[at]
                at += 1
                if other is None and cost < cheap:
                    run.append(cost)
                    continue
                self._add_run(serial, run)
                run = []
                entry = Entry(serial, serial + 1, cost, other)
                if lane is not None:
                    lane.expect(cost)
                    entry.slow = cost > self.policy.slow_factor * lane.expected
                    if self.policy.early:
                        entry.priority -= lane.head_start(cost)
                if self.policy.threshold and entry.ratio >= self._threshold:
                    entry.side = DEVICE
                self._waiting.add(entry)
            self._add_run(hi, run)
        self._since_threshold += at
        if self._since_threshold >= max(8, self.policy.window // 8):
            self._route()

    def _add_run(self, end: int, costs: list[float]) -> None:
        if costs:
            self._waiting.add(Entry(end - len(costs), end, sum(costs) / len(costs)))

    def _finished(self, event: m.Finished) -> None:
        chunk = self._inflight.get(event.chunk)
        if chunk is None:
            return
        if chunk.kind == "collate":
            self._retire(event.chunk)
            return
        before = self._done.get(event.chunk, 0)
        self._bytes += event.nbytes
        fresh = event.done - before
        if fresh:
            self._lanes[chunk.lane].measured(event.seconds, fresh)
            weight = max(0.02, fresh / (fresh + 32))
            self._sample_bytes += (event.nbytes / fresh - self._sample_bytes) * (weight if self._sample_bytes else 1)
            self._mark(chunk, before, event.done, event.failed)
        if event.final:
            self._retire(event.chunk)
            self._give_back(chunk, event.done, chunk.size)

    def _running(self, event: m.Running) -> None:
        chunk = self._inflight.get(event.chunk)
        if chunk is None or event.chunk not in self._started:
            return
        self._mark(chunk, self._done.get(event.chunk, 0), event.done, ())
        keep = event.done + 1
        if keep < chunk.size and event.since_s > max(_PATIENCE_S / 2, 2 * chunk.seconds / chunk.size):
            del self._started[event.chunk]
            self._out.append(m.Revoke(chunk.lane, event.chunk, keep))
        else:
            self._started[event.chunk] = self._now + _PATIENCE_S

    def _revoked(self, event: m.Revoked) -> None:
        chunk = self._inflight.get(event.chunk)
        if chunk is not None and event.keep < chunk.size:
            lane = self._lanes[chunk.lane]
            lane.remove(chunk)
            spans = _cut(chunk.spans, 0, event.keep)
            kept = m.Chunk(chunk.number, chunk.lane, chunk.kind, spans, chunk.seconds * event.keep / chunk.size)
            self._inflight[event.chunk] = kept
            lane.add(kept)
            self._give_back(chunk, event.keep, chunk.size)

    def _collate_needed(self, event: m.CollateNeeded) -> None:
        self._jobs.append(event)

    def _was_asked(self, event: m.Asked) -> None:
        self._asked = self._composed == 0
        if self._asked:
            self._compose(self._composition.asked())

    def _delivered(self, event: m.Delivered) -> None:
        size = self._sizes.pop(event.order)
        self._composed -= 1
        self._undelivered -= size
        self._bytes -= self._ready_bytes.pop(event.order)
        self._asked = False

    # --- bookkeeping ------------------------------------------------------------------------------------

    def _mark(self, chunk: m.Chunk, before: int, done: int, failed: tuple[int, ...]) -> None:
        """Samples ``before`` to ``done`` of the chunk are ready."""
        if done <= before:
            return
        self._done[chunk.number] = done
        self._running_samples -= done - before
        serials = _serials(chunk.spans, failed)
        for span in _cut(chunk.spans, before, done):
            complete = self._places.finish(span, serials)
            self._compose(self._composition.finished(span, serials, complete))
        if self._asked:
            self._compose(self._composition.asked())

    def _compose(self, batches: list[m.Compose]) -> None:
        for batch in batches:
            size = sum(hi - lo for lo, hi in batch.spans)
            self._sizes[batch.order] = size
            self._ready_bytes[batch.order] = min(self._bytes, int(size * self._sample_bytes))
            self._composed += 1
            self._asked = False
            self._out.append(batch)

    def _give_back(self, chunk: m.Chunk, start: int, stop: int) -> None:
        for lo, hi in _cut(chunk.spans, start, stop):
            self._running_samples -= hi - lo
            self._waiting.add(Entry(lo, hi))

    def _retire(self, number: int) -> m.Chunk:
        chunk = self._inflight.pop(number)
        self._lanes[chunk.lane].remove(chunk)
        self._done.pop(number, None)
        self._started.pop(number, None)
        return chunk

    # --- dispatch ---------------------------------------------------------------------------------------

    @property
    def _cpu(self) -> LaneState | None:
        return self._lanes.get(m.CPU)

    def _route(self) -> None:
        """Recompute the threshold from the window's costs and the lanes' backlogs."""
        self._since_threshold = 0
        devices = [lane for lane in self._lanes.values() if lane.is_device]
        if not self.policy.threshold or not devices:
            return
        entries = list(self._waiting.costed())
        if entries:
            cpu = self._cpu
            self._threshold = threshold(
                [e.cpu or 0.0 for e in entries],
                [e.device or 0.0 for e in entries],
                cpu.slots if cpu else 0,
                sum(lane.slots for lane in devices),
                cpu.seconds if cpu else 0.0,
                sum(lane.seconds for lane in devices),
            )
            self._waiting.move(self._threshold)

    def _fill(self) -> None:
        """Give work to every lane that would take some."""
        for lane in self._lanes.values():
            while lane.wants_more():
                if self._jobs and not lane.is_device:
                    job = self._jobs.popleft()
                    self._dispatch(lane, "collate", (), job.seconds, job.order)
                    continue
                entry = self._pick(lane)
                if entry is None or not self._send(lane, entry):
                    break

    def _pick(self, lane: LaneState) -> Entry | None:
        """The ticket that the free lane should take next, or None."""
        side = DEVICE if lane.is_device and self.policy.threshold else m.CPU
        fast_only = self.policy.reserve and lane.slow_slots_taken()
        entry = self._waiting.first(side, fast_only)
        if entry is not None and not (lane.is_device and entry.device is None):
            return entry
        if not self.policy.threshold or len(self._lanes) == 1:
            return None
        other = m.CPU if side == DEVICE else DEVICE
        entry = self._waiting.nearest(other)
        if entry is None or not self._pays(lane, entry, other):
            return None
        return entry

    def _pays(self, thief: LaneState, entry: Entry, owner_side: str) -> bool:
        """Whether the thief would finish the ticket sooner than its own side would."""
        owners = [lane for lane in self._lanes.values() if lane.is_device == (owner_side == DEVICE)]
        mine = (entry.device if thief.is_device else entry.cpu) or 0.0
        theirs = (entry.cpu if thief.is_device else entry.device) or 0.0
        slots = sum(lane.slots for lane in owners)
        if slots == 0:
            return True
        backlog = sum(lane.seconds for lane in owners) + self._side_seconds(owner_side)
        return mine <= backlog / slots + theirs

    def _side_seconds(self, side: str) -> float:
        """Predicted seconds of what waits on the side; an estimate from its count and the lanes' mean."""
        lanes = [lane for lane in self._lanes.values() if lane.is_device == (side == DEVICE)]
        return self._waiting.count(side) * (lanes[0].expected if lanes else 0.0)

    def _send(self, lane: LaneState, entry: Entry) -> bool:
        """Dispatch a chunk that begins with ``entry``; False when memory forbids it."""
        if entry.inspect:
            span = (entry.lo, min(entry.hi, entry.lo + _INSPECT_CHUNK))
            self._waiting.take(entry, span[1] - span[0])
            self._dispatch(lane, "inspect", (span,), 0.0)
            return True
        spans, seconds = self._gather(lane, entry)
        if not spans:
            return False
        self._dispatch(lane, "run", tuple(spans), seconds)
        return True

    def _gather(self, lane: LaneState, entry: Entry) -> tuple[list[m.Span], float]:
        """Take tickets for one dispatch from ``waiting``: as many as are worth its round trip."""
        limit, target = lane.chunk_limits()
        spans: list[m.Span] = []
        total, seconds = 0, 0.0
        following: Entry | None = entry
        while following is not None:
            each = lane.predict(following)
            if total and (following.inspect or (seconds + each > target)):
                break
            count = min(following.hi - following.lo, limit - total)
            if count > 1:
                count = min(count, max(1, int((target - seconds) / each))) if each > 0 else 1
            count = self._within_budget(following, count, total)
            if count == 0:
                break
            self._waiting.take(following, count)
            self._append(spans, following.lo, following.lo + count)
            total += count
            seconds += count * each
            if total >= limit or count < following.hi - following.lo or each == 0.0:
                break
            following = self._next_after(lane, following)
        return spans, seconds

    def _next_after(self, lane: LaneState, entry: Entry) -> Entry | None:
        """What may travel in the same chunk: for a device the next of its side, else the contiguous cheap run."""
        if lane.is_device:
            return self._waiting.first(DEVICE if self.policy.threshold else m.CPU)
        following = self._waiting.at(entry.hi)
        return following if following is not None and following.side == m.CPU and not following.slow else None

    @staticmethod
    def _append(spans: list[m.Span], lo: int, hi: int) -> None:
        if spans and spans[-1][1] == lo:
            spans[-1] = (spans[-1][0], hi)
        else:
            spans.append((lo, hi))

    def _within_budget(self, entry: Entry, count: int, taken: int) -> int:
        """How many of ``count`` tickets memory allows. The oldest sample that is not ready always may (P4)."""
        budget = self.policy.budget_bytes
        self._short_of_memory = False
        if budget is None:
            return count
        free = budget - self.bytes_in_flight - taken * self._sample_bytes
        if self._sample_bytes > 0:
            count = min(count, max(0, int(free / self._sample_bytes)))
        if count == 0:
            self._short_of_memory = True
            oldest_running = min((c.spans[0][0] for c in self._inflight.values() if c.spans), default=None)
            oldest = self._waiting.oldest()
            if taken == 0 and oldest is entry and (oldest_running is None or entry.lo < oldest_running):
                return 1
        return count

    def _dispatch(
        self, lane: LaneState, kind: str, spans: tuple[m.Span, ...], seconds: float, order: int = -1
    ) -> None:
        chunk = m.Chunk(self._next_chunk, lane.name, kind, spans, seconds, order)
        self._next_chunk += 1
        self._inflight[chunk.number] = chunk
        lane.add(chunk)
        if kind == "run":
            size = chunk.size
            self._running_samples += size
            if size > 1 and not lane.is_device:
                self._started[chunk.number] = self._now + max(_PATIENCE_S, 2 * seconds + lane.backlog_s())
        self._out.append(m.Dispatch(chunk))


def _cut(spans: tuple[m.Span, ...], start: int, stop: int) -> tuple[m.Span, ...]:
    """The spans of samples number ``start`` to ``stop`` of a chunk."""
    out: list[m.Span] = []
    offset = 0
    for lo, hi in spans:
        a, b = max(start - offset, 0), min(stop - offset, hi - lo)
        if a < b:
            out.append((lo + a, lo + b))
        offset += hi - lo
    return tuple(out)


def _serials(spans: tuple[m.Span, ...], offsets: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(_cut(spans, offset, offset + 1)[0][0] for offset in offsets)
