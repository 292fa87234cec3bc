"""Admitted tickets become waiting entries: what they cost, on which side they wait, when they should start."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count, repeat

from minato_gpu.samples import TicketId
from minato_gpu.scheduling.lane_state import LaneState
from minato_gpu.scheduling.messages import CPU, LaneOpened
from minato_gpu.scheduling.pacing import Pace
from minato_gpu.scheduling.places import Place
from minato_gpu.scheduling.plans import Plan
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.routing import Router
from minato_gpu.scheduling.waiting import INFINITE, Entry, Waiting
from minato_gpu.spans import TicketSpan

LAID_DOWN_S = 300e-6  # laying a sample down for the worker that joins its batch, and reading it there
_ENOUGH = 512  # samples, from which a lane's mean is one
_UNKNOWN_S = 1e-3  # what a device is taken to need for a sample while nothing at all is known


class Intake:
    """Ranks and queues tickets for the lanes that are open."""

    def __init__(self, policy: Policy, lanes: dict[str, LaneState], waiting: Waiting) -> None:
        self.pace = Pace(policy)
        self.router = Router(policy, lanes, waiting)
        self.cold = False  # nothing is ready for the consumer: what is admitted now should feed it first
        self.newest = TicketId(0)  # the end of the serials admitted
        self._follow: int | None = None  # of the same epoch, as its sampler says
        self._epochs: list[tuple[TicketId, int]] = []  # (first serial, epoch), rising
        self._policy = policy
        self._lanes = lanes
        self._waiting = waiting
        self._has_device = False
        self._since_route = 0
        self._guessed_from: tuple[int, ...] = ()
        self._ranked_for = 0  # open slots when the waiting tickets were last ranked

    def open(self, opened: LaneOpened) -> None:
        """A lane has more slots."""
        if opened.lane not in self._lanes:
            state = LaneState(opened.lane, opened.kind, self._policy, opened.known, on_host=opened.on_host)
            self._lanes[opened.lane] = state
        self.resize(opened.lane, opened.slots)

    def resize(self, name: str, slots: int) -> None:
        """``slots`` more (or fewer) slots of a lane."""
        self._lanes[name].slots += slots
        lanes, had_device = self._lanes.values(), self._has_device
        self._has_device = any(lane.is_device and lane.slots > 0 for lane in lanes)
        self.pace.slots = sum(lane.slots for lane in lanes)
        self.pace.cpu_slots = sum(lane.slots for lane in lanes if not lane.is_device)
        self.measure()
        unread = self._has_device and not had_device and self._policy.inspect
        if unread:
            self._waiting.read_first(self._read_first)  # a window may have come before the device
        if unread or not self._ranked_for or not 0.8 < self.pace.slots / self._ranked_for < 1.25:
            self._ranked_for = self.pace.slots
            self._waiting.reorder(self._reconsider)
        self.router.update(self.rank)

    def measure(self) -> None:
        """How much all lanes do in a second, for their slots and speeds."""
        lanes = self._lanes.values()
        self.pace.cpu_capacity = sum(lane.slots * lane.speed for lane in lanes if not lane.is_device)
        self.pace.measure()

    def cpu_mean(self) -> float:
        """What a sample takes a CPU slot of this host, as measured; 0.0 while nothing is known."""
        means = [lane.mean * lane.speed for lane in self._lanes.values() if lane.mean > 0 and not lane.is_device]
        return means[0] if means else 0.0  # lanes of this host were opened first

    def _reconsider(self, entry: Entry) -> None:
        """Which lane suits the entry, and when it should start, anew."""
        if entry.device is not None or entry.steps is not None:
            entry.suit(self.pace.patience())
        self.rank(entry)

    def rank(self, entry: Entry) -> None:
        """When the entry should start, for what it costs on its side."""
        cost = entry.cpu if entry.side == CPU else entry.device
        if entry.steps is not None and entry.side == CPU and (plan := self.router.cut(entry)) is not None:
            cost = plan.cpu + plan.device
        if cost is not None and entry.hi - entry.lo == 1:
            entry.slow = cost > self.pace.slow_s()
            entry.priority = self.pace.priority(entry.place.first, cost, entry.cold and not entry.slow)

    def enter(self, place: Place, follow: int | None) -> None:
        """The newest place enters the window; so many samples of its epoch ``follow``, it is said."""
        self.newest, self._follow = place.end, follow
        if not self._epochs or self._epochs[-1][1] != place.epoch:
            self._epochs.append((place.first, place.epoch))
            del self._epochs[:-4]  # no more can be in the window: one begins only when the one before has ended

    def left(self, serial: TicketId) -> int | None:
        """How many tickets of the epoch there are from this one on; None while some are not admitted."""
        end = next((first for first, _ in self._epochs if first > serial), self.newest if self.pace.ending else None)
        return None if end is None else end - serial

    def left_as_said(self, serial: TicketId) -> int | None:
        """The same by what the sampler says of its length, which may be wrong; None where it says nothing."""
        return None if self._follow is None else self.newest + self._follow - serial

    def add_unknown(self, lo: TicketId, hi: TicketId, place: Place) -> None:
        """Tickets of the place whose costs nobody knows."""
        entry = Entry(lo, hi, place)
        if self._policy.inspect and (self._has_device or not self._policy.cpu_runs):
            self._read_first(entry)
        self._waiting.add(entry)

    def _read_first(self, entry: Entry) -> None:
        """Read the headers of these tickets early: costs should be known when there is still a choice."""
        entry.inspect = True
        entry.priority -= self._policy.window / 2

    def add_costed(
        self,
        spans: Sequence[TicketSpan],
        place: Place,
        cpu: Sequence[float],
        device: Sequence[float] | None,
        read: bool = False,
        between: Sequence[Sequence[Plan]] | None = None,
    ) -> None:
        """Queue tickets of a place with predicted costs: where there is no device, neighbours as runs, else each alone.

        ``read``: the host read has been done and its result is held. ``between``: the plans of each ticket that do a
        part on either lane.
        """
        at = 0
        for lo, hi in spans:
            if device is None:
                self._add_runs(lo, place, cpu[at : at + hi - lo])
            else:
                these = slice(at, at + hi - lo)
                self._add_each(
                    lo, place, cpu[these], device[these], read, repeat(()) if between is None else between[these]
                )
            at += hi - lo
        if device is not None:
            self._guess_again()
        self._since_route += at
        if self._has_device and self._since_route >= max(8, self._policy.window // 8):
            self._since_route = 0
            self.router.update(self.rank)

    def _add_runs(self, first: TicketId, place: Place, costs: Sequence[float]) -> None:
        """Neighbours for the CPU, as runs from which leases are cut; those that are slow, or would be a lease by
        themselves, alone."""
        size, total = len(costs), sum(costs)
        if total == total:
            self.pace.expect(total / size, None, size)
        lease_s = self.pace.lease_s(0.0, self.pace.window)
        limit = max(min(lease_s / 2, self.pace.slow_s(), 2 * total / size), self._policy.chunk_s / 4)
        if self._policy.joins:  # the rest of its batch would have to be laid down
            limit = max(limit, LAID_DOWN_S * size) if self.pace.cpu_slots > 1 else INFINITE
        start = 0
        for at in () if max(costs) <= limit else range(size):
            if not costs[at] <= limit:  # nan: nothing is known of it
                self._add_run(TicketId(first + start), place, costs[start:at])
                self._add_each(TicketId(first + at), place, costs[at : at + 1], None, False, ((),), expected=True)
                start = at + 1
        self._add_run(TicketId(first + start), place, costs[start:])

    def _add_run(self, first: TicketId, place: Place, costs: Sequence[float]) -> None:
        if costs:
            self._waiting.add(Entry.run(first, place, costs))

    def add_rest(self, entry: Entry) -> None:
        """A sample that was handed over waits for a lane that goes on with it."""
        if entry.cpu is not None:
            entry.set_plans(entry.between)
            self._settle(entry)
        self._waiting.add(entry)

    def settle_again(self, entry: Entry) -> None:
        """A ticket comes back from a lane that may have been the last of its kind: nobody would take it in time."""
        if entry.side != CPU and self._policy.cpu_runs and self.router.no_device(entry.home):
            entry.side = CPU
            self.rank(entry)

    def _settle(self, entry: Entry) -> None:
        """Choose the side of a ticket whose costs are known."""
        if entry.device is not None or entry.steps is not None:
            entry.suit(self.pace.patience())
        if entry.device is not None and (not self._policy.cpu_runs or self.router.beyond(entry)):
            entry.side = entry.home
        self.rank(entry)

    def _add_each(
        self,
        first: TicketId,
        place: Place,
        cpu: Sequence[float],
        device: Sequence[float] | None,
        read: bool,
        between: Iterable[Sequence[Plan]],
        *,
        expected: bool = False,
    ) -> None:
        """Queue neighbours of a place each alone."""
        entries: list[Entry] = []
        for serial, seconds, there, plans in zip(count(first), cpu, device or repeat(None), between, strict=False):
            known = seconds == seconds and there == there  # else nan
            cost, other = (seconds, there) if known else self._guess(seconds, there)
            entry = Entry(TicketId(serial), TicketId(serial + 1), place, cost, other)
            entry.predicted = None if known or there is None else (seconds, there)
            entry.read = read
            entry.cold = self.cold
            if cost is not None and plans and all(plan.cpu >= 0 <= plan.device for plan in plans):  # none is nan
                entry.set_plans(plans)
            entries.append(entry)
        if not expected:
            self.pace.expect_each([(each.cpu, each.device, each.steps) for each in entries if each.cpu is not None])
        for entry in entries:
            if entry.cpu is not None:
                self._settle(entry)
            elif entry.device is not None and not self._policy.cpu_runs:
                entry.side = entry.home
            self._waiting.add(entry)

    def _guess_again(self) -> None:
        """Cost what waits and was guessed anew, each time that lanes have measured eight times as many samples: headers
        are read half a window ahead, before anything is known."""
        counts = (min(lane.costs.samples, _ENOUGH) for lane in self._lanes.values())
        known = tuple(count.bit_length() // 3 for count in counts)
        if known != self._guessed_from:
            self._guessed_from = known
            self._waiting.reorder(self._cost_again)

    def _cost_again(self, entry: Entry) -> None:
        if entry.predicted is not None and not entry.at:
            entry.cpu, entry.device = self._guess(*entry.predicted)
            if entry.cpu is not None:
                entry.side = CPU
                self._settle(entry)

    def _guess(self, cpu: float, device: float | None) -> tuple[float | None, float | None]:
        """Costs with nan (nothing known yet) replaced: by the lane's mean, for a device else by the CPU's cost.
        Where the CPU lane only reads, its cost is never known, and decides nothing."""
        cost: float | None = cpu
        if cpu != cpu:
            cost = self.cpu_mean() or (None if self._policy.cpu_runs else _UNKNOWN_S)
        if device is not None and device != device:
            means = [lane.mean for lane in self._lanes.values() if lane.is_device and lane.mean > 0]
            device = min(means) if means else cost or _UNKNOWN_S
        return cost, device
