"""``Intake``: turns admitted tickets into waiting entries (``waiting.Entry``) with costs, a side and a priority."""

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

COPY_S = 100e-6  # seconds to copy a sample that another loader has prepared, about
STORE_S = 300e-6  # seconds to store a sample for the worker that collates its batch, and to read it there
_GROUPED_BELOW_S = 500e-6  # costlier samples are worth a dispatch of each batch
_GROUPS_LEFT = 32  # groups of batches, at least, that each slot is still to get
_ENOUGH = 512  # samples after which a lane's mean is reliable
_UNKNOWN_S = 1e-3  # assumed device seconds of a sample while nothing is known


class Intake:
    """Costs, ranks and queues tickets for the lanes that are open."""

    def __init__(self, policy: Policy, lanes: dict[str, LaneState], waiting: Waiting) -> None:
        self.pace = Pace(policy)
        self.router = Router(policy, lanes, waiting)
        self.cold = False  # nothing is ready for the consumer: fast samples admitted now go first
        self.newest = TicketId(0)  # the end of the serials admitted
        self._expected_after: int | None = None  # samples of the epoch after ``newest``, by the sampler's length
        self._epochs: list[tuple[TicketId, int]] = []  # (first serial, epoch), rising
        self._policy = policy
        self._lanes = lanes
        self._waiting = waiting
        self._has_device = False
        self._since_route = 0
        self._guessed_from: tuple[int, ...] = ()
        self._ranked_for = 0  # open slots when the waiting tickets were last ranked

    def open(self, opened: LaneOpened) -> None:
        """Handles new slots of a lane, which may be new."""
        if opened.lane not in self._lanes:
            state = LaneState(opened.lane, opened.kind, self._policy, opened.known, on_host=opened.on_host)
            self._lanes[opened.lane] = state
        self.resize(opened.lane, opened.slots)

    def resize(self, name: str, slots: int) -> None:
        """Adds ``slots`` slots to a lane (negative: removes them) and updates what depends on them."""
        self._lanes[name].slots += slots
        lanes, had_device = self._lanes.values(), self._has_device
        self._has_device = any(lane.is_device and lane.slots > 0 for lane in lanes)
        self.pace.slots = sum(lane.slots for lane in lanes)
        self.pace.cpu_slots = sum(lane.slots for lane in lanes if not lane.is_device)
        self.measure()
        unread = self._has_device and not had_device and self._policy.inspect
        if unread:
            self._waiting.require_inspection(
                self._mark_for_inspection
            )  # the window may have been filled before the device opened
        if unread or not self._ranked_for or not 0.8 < self.pace.slots / self._ranked_for < 1.25:
            self._ranked_for = self.pace.slots
            self._waiting.reorder(self._update)
        self.router.update(self.rank)

    def measure(self) -> None:
        """Recomputes the CPU lanes' capacity from their slots and speeds."""
        lanes = self._lanes.values()
        self.pace.cpu_capacity = sum(lane.slots * lane.speed for lane in lanes if not lane.is_device)
        self.pace.measure()

    def cpu_mean(self) -> float:
        """Returns the measured seconds of a sample on a CPU slot of this host; 0.0 while unknown."""
        means = [lane.mean * lane.speed for lane in self._lanes.values() if lane.mean > 0 and not lane.is_device]
        return means[0] if means else 0.0  # lanes of this host were opened first

    def _update(self, entry: Entry) -> None:
        """Recomputes an entry's ratio and rank."""
        if entry.device is not None or entry.steps is not None:
            entry.update_ratio(self.pace.patience())
        self.rank(entry)

    def rank(self, entry: Entry) -> None:
        """Sets the priority of a single sample, and whether it is slow, from its predicted cost on its side. Runs and
        samples of unknown cost keep theirs."""
        cost = entry.cpu if entry.side == CPU else entry.device
        if entry.steps is not None and entry.side == CPU and (plan := self.router.cut(entry)) is not None:
            cost = plan.cpu + plan.device
        if cost is not None and entry.hi - entry.lo == 1:
            entry.slow = cost > self.pace.slow_s()
            entry.priority = self.pace.priority(entry.place.first, cost, entry.cold and not entry.slow)

    def enter(self, place: Place, follow: int | None) -> None:
        """Records the newest place; ``follow``: samples of its epoch after it, by the sampler's length."""
        self.newest, self._expected_after = place.end, follow
        if not self._epochs or self._epochs[-1][1] != place.epoch:
            self._epochs.append((place.first, place.epoch))
            del self._epochs[:-4]  # the window holds no more epochs

    def left(self, serial: TicketId) -> int | None:
        """Returns how many tickets of the epoch there are from ``serial`` on; None while some are not admitted."""
        end = next((first for first, _ in self._epochs if first > serial), self.newest if self.pace.ending else None)
        return None if end is None else end - serial

    def left_by_length(self, serial: TicketId) -> int | None:
        """Returns how many tickets of the epoch there are from ``serial`` on by the sampler's length, which may be
        wrong; None without one."""
        return None if self._expected_after is None else self.newest + self._expected_after - serial

    def group_s(self, each: float) -> float:
        """Returns the most work, in seconds, of batches that are dispatched together. ``each``: seconds of a sample.

        It is less where little of the epoch is left by the sampler's length, or slots would not end at the same time,
        and where samples are so costly that a dispatch of one batch costs next to nothing.
        """
        policy, left = self._policy, self._expected_after
        if each >= _GROUPED_BELOW_S:
            return policy.chunk_s
        fair_s = INFINITE if left is None else left * each / (_GROUPS_LEFT * max(self.pace.cpu_slots, 1))
        return max(policy.chunk_s, min(policy.group_s, fair_s))

    def add_unknown(self, lo: TicketId, hi: TicketId, place: Place) -> None:
        """Queues tickets of the place whose costs are unknown."""
        entry = Entry(lo, hi, place)
        if self._policy.inspect and (self._has_device or not self._policy.cpu_runs):
            self._mark_for_inspection(entry)
        self._waiting.add(entry)

    def add_copies(self, lo: TicketId, hi: TicketId, place: Place) -> None:
        """Queues tickets of the place of which a worker has but to copy the samples."""
        self._waiting.add(Entry(lo, hi, place, COPY_S))

    def _mark_for_inspection(self, entry: Entry) -> None:
        """Marks an entry for inspection, half a window early, so that its costs are known before it is routed."""
        entry.inspect = True
        entry.priority -= self._policy.window / 2

    def add_costed(
        self,
        first: TicketId,
        place: Place,
        cpu: Sequence[float],
        device: Sequence[float] | None,
        between: Sequence[Sequence[Plan]] | None = None,
        *,
        read: bool = False,
    ) -> None:
        """Queues tickets of a place, from ``first`` on, with predicted costs: where there is no device, neighbours as
        runs, else each alone.

        ``cpu``, ``device``: seconds of each ticket, nan: unknown; None: there is no device lane. ``between``: the
        divided plans of each. ``read``: the host read has been done and its result is stored.
        """
        if device is None:
            self._add_runs(first, place, cpu)
        else:
            self._add_each(first, place, cpu, device, read, repeat(()) if between is None else between)
            self._update_guesses()
        self._since_route += len(cpu)
        if self._has_device and self._since_route >= max(8, self._policy.window // 8):
            self._since_route = 0
            self.router.update(self.rank)

    def _add_runs(self, first: TicketId, place: Place, costs: Sequence[float]) -> None:
        """Queues neighbours for the CPU as runs, from which leases are cut. Samples that are slow, or worth a lease by
        themselves, are queued alone."""
        size, total = len(costs), sum(costs)
        if total == total:
            self.pace.expect(total / size, None, size)
        lease_s = self.pace.lease_s(0.0, self.pace.window)
        limit = max(min(lease_s / 2, self.pace.slow_s(), 2 * total / size), self._policy.chunk_s / 4)
        if self._policy.joins:  # the rest of its batch would have to be stored
            limit = max(limit, STORE_S * size) if self.pace.cpu_slots > 1 else INFINITE
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
        """Queues a sample that was handed over for a lane that continues it."""
        if entry.cpu is not None:
            entry.set_plans(entry.between)
            self._choose_side(entry)
        self._waiting.add(entry)

    def reconsider_side(self, entry: Entry) -> None:
        """Moves a ticket that comes back from a lost device lane to the CPU's side if no device lane is left to take
        it."""
        if entry.side != CPU and self._policy.cpu_runs and self.router.no_device(entry.home):
            entry.side = CPU
            self.rank(entry)

    def _choose_side(self, entry: Entry) -> None:
        """Chooses the side of a ticket whose costs are known."""
        if entry.device is not None or entry.steps is not None:
            entry.update_ratio(self.pace.patience())
        if entry.device is not None and (not self._policy.cpu_runs or self.router.prefers_device(entry)):
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
        """Queues neighbours of a place as single samples."""
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
                self._choose_side(entry)
            elif entry.device is not None and not self._policy.cpu_runs:
                entry.side = entry.home
            self._waiting.add(entry)

    def _update_guesses(self) -> None:
        """Recomputes guessed costs each time that lanes have measured eight times as many samples: headers are read
        half a window ahead, before costs are known."""
        counts = (min(lane.costs.samples, _ENOUGH) for lane in self._lanes.values())
        known = tuple(count.bit_length() // 3 for count in counts)
        if known != self._guessed_from:
            self._guessed_from = known
            self._waiting.reorder(self._update_guess)

    def _update_guess(self, entry: Entry) -> None:
        if entry.predicted is not None and not entry.stage:
            entry.cpu, entry.device = self._guess(*entry.predicted)
            if entry.cpu is not None:
                entry.side = CPU
                self._choose_side(entry)

    def _guess(self, cpu: float, device: float | None) -> tuple[float | None, float | None]:
        """Replaces unknown costs (nan) by the lane's mean; for a device without one, by the CPU's cost.

        Where the CPU lane only reads, its cost is never known and decides nothing.
        """
        cost: float | None = cpu
        if cpu != cpu:
            cost = self.cpu_mean() or (None if self._policy.cpu_runs else _UNKNOWN_S)
        if device is not None and device != device:
            means = [lane.mean for lane in self._lanes.values() if lane.is_device and lane.mean > 0]
            device = min(means) if means else cost or _UNKNOWN_S
        return cost, device
