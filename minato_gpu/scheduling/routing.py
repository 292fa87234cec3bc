"""``Router``: decides on which lane samples run, by a threshold on cpu_cost / device_cost at which both kinds of lane
finish the window together.

Preparing a window of samples on unlike lanes is a linear program whose optimum is a threshold on the cost ratio (the
fractional relaxation of scheduling on unrelated machines, Lawler and Labetoulle 1978; with two kinds of machine a
fractional knapsack). FusionFlow (VLDB 2023) adapts a size threshold; this one is recomputed. For samples that can be
divided it is a threshold on the steps between their plans (see ``plans``).

Several devices: where batches go to them in turn in strict order, each device lane prepares only batches of its own
device, so that nothing crosses between devices. All share one threshold, because each gets its share of the places, but
each lane takes and gives only its own tickets. Out of order a sample's device is unknown beforehand: every device lane
takes any, and results are copied between devices. Simulated (2 to 8 devices, 7 to 4 CPU slots each, 6,400 samples,
hybrid costs): keeping to one's own costs strict order 0.3 to 2.3 % of the time.

Rejected: keeping to one's own out of order, composing first what need not cross. Half of the device's results still
crossed, since a consumer that takes batches as soon as there are enough samples leaves no choice. A crossing takes 30
us for 600 KB at 20 GB/s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from minato_gpu.scheduling.lane_state import LaneState
from minato_gpu.scheduling.messages import CPU
from minato_gpu.scheduling.plans import Plan
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.waiting import Entry, Waiting


def threshold(
    cpu: ArrayLike,
    device: ArrayLike,
    cpu_slots: float,
    device_slots: float,
    cpu_backlog: float = 0.0,
    device_backlog: float = 0.0,
) -> tuple[float, float]:
    """Returns the ratio cpu / device from which on samples should go to the device, and the seconds until both lanes
    are done.

    The ratio is infinity when the device should take nothing, 0.0 when it should take everything. Both results are
    infinity where neither lane has slots.

    Args:
        cpu, device: predicted seconds of each waiting sample, shape (n,).
        cpu_backlog, device_backlog: predicted seconds of work that the lanes already hold.
    """
    cpu_costs, device_costs = np.asarray(cpu, dtype=np.float64), np.asarray(device, dtype=np.float64)
    if device_slots <= 0 and cpu_slots <= 0:
        return float("inf"), float("inf")
    if device_slots <= 0 or cpu_costs.size == 0:
        return float("inf"), (cpu_backlog + float(cpu_costs.sum())) / max(cpu_slots, 1)
    if cpu_slots <= 0:
        return 0.0, (device_backlog + float(device_costs.sum())) / device_slots
    ratios = cpu_costs / np.maximum(device_costs, 1e-12)
    order = np.argsort(-ratios, kind="stable")
    device_done = (device_backlog + np.cumsum(device_costs[order])) / device_slots
    taken_off = np.cumsum(cpu_costs[order])
    cpu_done = (cpu_backlog + taken_off[-1] - taken_off) / cpu_slots  # with samples up to i on the device
    before = cpu_done + cpu_costs[order] / cpu_slots
    # sample i goes to the device if the device, with it, ends no later than the CPU would with it
    taken = int(np.searchsorted(device_done - before, 0.0, side="right"))
    if taken == 0:
        return float("inf"), float(max(before[0], device_backlog / device_slots))
    drain = float(max(device_done[taken - 1], cpu_done[taken - 1]))
    if taken == cpu_costs.size:
        return 0.0, drain
    return float(ratios[order[taken - 1]] + ratios[order[taken]]) / 2, drain


class Router:
    """Holds the routing threshold of one loader run, and chooses what an idle lane steals from the others."""

    def __init__(self, policy: Policy, lanes: Mapping[str, LaneState], waiting: Waiting) -> None:
        self.threshold = float("inf")
        self.price = 1.0  # seconds that a second of device work counts as
        self.spared = False  # devices get nothing while CPU lanes run
        self.promised = 0.0  # device seconds of samples that run on the CPU and will be handed over
        self._policy = policy
        self._lanes = lanes
        self._waiting = waiting

    def update(self, rank: Callable[[Entry], None]) -> None:
        """Recomputes the threshold from the window's costs and the lanes' backlogs, and moves entries that change
        sides."""
        if not self._policy.cpu_runs:  # no choice
            return
        if not any(lane.is_device for lane in self._lanes.values()):
            return
        homes, entries = self._waiting.homes, list(self._waiting.costed())
        closed = [home for home in homes if not self._open(home)]
        if len(closed) == len(homes):
            self.threshold = float("inf")  # later entries must not wait for a lost device
        elif served := [entry for entry in entries if entry.home not in closed]:
            left = sum(entry.cpu or 0.0 for entry in entries if entry.home in closed)
            self.threshold = self._balance(served, left)
        if entries:
            self._waiting.move(self.threshold, rank, closed)

    def _balance(self, entries: Sequence[Entry], left: float) -> float:
        """Returns the threshold for these entries; ``left``: CPU seconds of samples that no device can take."""
        cpu_slots, cpu_s, device_slots, device_s = 0.0, 0.0, 0.0, self.promised
        for lane in self._lanes.values():
            slots, seconds = lane.slots * lane.speed, lane.seconds * lane.speed
            if lane.is_device:
                device_slots, device_s = device_slots + slots, device_s + seconds
            else:
                cpu_slots, cpu_s = cpu_slots + slots, cpu_s + seconds
        on_cpu, on_device, more = _steps(entries)
        ratio, _ = threshold(
            on_cpu,
            [self.price * seconds for seconds in on_device],
            cpu_slots,
            0 if self._spares_devices() else device_slots,
            left + more + cpu_s,
            self.price * device_s,
        )
        return ratio * self.price

    def _spares_devices(self) -> bool:
        """Returns True when devices get nothing because the CPU lanes, of which one is open, keep up."""
        if self.spared and self._policy.cpu_runs:
            for lane in self._lanes.values():
                if lane.slots > 0 and not lane.is_device:
                    return True
        return False

    def cut(self, entry: Entry) -> Plan | None:
        """Returns the plan by which a CPU slot that takes the entry hands it over; None: it does all of it."""
        return None if entry.steps is None or self.no_device(entry.home) else entry.cut(self.threshold)

    def prefers_device(self, entry: Entry) -> bool:
        """Returns True when the entry is on the device's side of the threshold and its device lane is open."""
        return entry.ratio >= self.threshold and bool(self._open(entry.home))

    def may_rescue(self, entry: Entry) -> bool:
        """Returns True when a device could continue the sample from a later stage."""
        ahead = any(plan.split > entry.stage for plan in entry.between)
        return ahead and self._policy.rescue and not self.no_device(entry.home)

    def rescues(self, entry: Entry, factor: float, since_s: float) -> tuple[int, ...]:
        """Returns the split points at which a device would finish the sample before the CPU; empty if there are none.

        The sample has run for ``since_s``, which is ``factor`` times the prediction. So the device is assumed to take
        ``factor`` times as long for the rest, too, and the CPU another ``since_s``, as is usual for heavy tails.
        """
        if not self.may_rescue(entry):
            return ()
        devices = self._open(entry.home)
        queued = sum(lane.seconds for lane in devices)  # without waiting entries: the sample would be among the oldest
        wait = queued / sum(lane.slots for lane in devices)
        return tuple(
            plan.split
            for plan in entry.between
            if plan.split > entry.stage and plan.store_s + self.price * (wait + factor * plan.device) < since_s
        )

    def no_device(self, home: str) -> bool:
        """Returns True when no device lane of this side is to get anything."""
        return self._spares_devices() or not self._open(home)

    def _open(self, home: str) -> list[LaneState]:
        """Returns the device lanes of this side that take work."""
        return [lane for lane in self._lanes.values() if lane.home == home and lane.slots > 0]

    def steal(self, thief: LaneState, newest: int) -> tuple[Entry, Plan | None] | None:
        """Returns the entry nearest to the threshold that the thief would finish before the side on which it waits, and
        the plan by which a CPU slot hands it over (None: the thief does all of it); None if there is no such entry.

        When that side would start an entry is estimated from its position among the serials up to ``newest``.
        """
        if thief.is_device:
            return None if self._spares_devices() else self._steal_from(CPU, thief.home, thief, newest)
        for home in sorted(self._waiting.homes, key=lambda home: -self._waiting.seconds[home]):
            found = self._steal_from(home, home, thief, newest)
            if found is not None:
                return found
        return None

    def _steal_from(self, owner: str, home: str, thief: LaneState, newest: int) -> tuple[Entry, Plan | None] | None:
        """Returns what ``steal`` returns, from one side and among the tickets of one home."""
        owners = [lane for lane in self._lanes.values() if lane.home == owner]
        slots = sum(lane.slots * lane.speed for lane in owners)
        if slots <= 0:
            entry = self._waiting.nearest(owner, home)
            return None if entry is None else (entry, None if thief.is_device else self.cut(entry))
        oldest = self._waiting.oldest()
        first = oldest.lo if oldest is not None else 0
        running = sum(lane.seconds * lane.speed for lane in owners)
        per_position = self._waiting.seconds[owner] / max(1, newest - first)
        for entry in self._waiting.near(owner, home):
            device, cpu = self.price * (entry.device or 0.0), entry.cpu or 0.0
            wait = (running + per_position * (entry.lo - first)) / slots
            if thief.is_device:
                plan = self.cut(entry)
                if device <= wait + (cpu if plan is None else plan.cpu + self.price * plan.device):
                    return entry, None
                continue
            if entry.steps is not None and len(entry.steps) > 1:
                plan = entry.steps[-2].plan  # the last plan before all on the device
                if max(plan.cpu, wait) + self.price * plan.device <= wait + device:
                    return entry, plan
            if cpu <= wait + device:
                return entry, None
        return None


def _steps(entries: Sequence[Entry]) -> tuple[list[float], list[float], float]:
    """Returns the CPU seconds saved and device seconds spent by each step, and the CPU seconds that no step removes."""
    cpu: list[float] = []
    device: list[float] = []
    left = 0.0
    for entry in entries:
        if entry.steps is None:
            cpu.append(entry.cpu or 0.0)
            device.append(entry.device or 0.0)
        else:
            cpu += [step.cpu for step in entry.steps]
            device += [step.device for step in entry.steps]
            left += entry.steps[-1].plan.cpu
    return cpu, device, left
