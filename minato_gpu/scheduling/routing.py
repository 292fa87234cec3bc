"""Which lane: the threshold on cpu_cost / device_cost at which both kinds of lane drain the window together.

For samples that can be cut it is a threshold on the steps between their plans (see ``plans``).

Where batches live on several devices in turn, in strict order, a device lane prepares for its own device's batches
alone, so that nothing that a device has made must go to another. The threshold is one for all, because every device
gets its share of the places, but each device lane takes and gives among its own. Where batches are composed from what
is ready, or a user's own overtake each other, nobody knows before where a sample will go: every device lane takes any,
and what was made elsewhere is copied from device to device. Simulated (2 to 8 devices, 7 to 4 CPU slots for each, 6,400
samples at the design's hybrid costs): keeping each lane to its own costs strict order 0.3 to 2.3 % of the time.
Rejected: the same out of order, with batches composed first of what need not cross; half of what devices had made
crossed still, for a consumer that takes batches as soon as there are enough samples has no choice among them. A
crossing takes 30 microseconds for 600 KB at 20 GB/s.

Preparing a window of samples on unlike lanes is a linear program whose optimum is a threshold on the cost ratio
(the fractional relaxation of scheduling on unrelated machines, Lawler and Labetoulle 1978; with two kinds of
machine it is a fractional knapsack). FusionFlow (VLDB 2023) adapts a size threshold; this one is recomputed.
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
    """The ratio cpu / device from which on samples should go to the device, and when the lanes are then through.

    ``cpu`` and ``device``: predicted seconds of each waiting sample, shape (n,). Backlogs: predicted seconds of
    the work that the lanes already hold. The ratio is infinity when the device should take nothing, 0.0 when it
    should take everything; the time is in seconds from now, backlogs included.
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
    # sample i goes to the device if the device, with it, is through no later than the CPU would be with it
    taken = int(np.searchsorted(device_done - before, 0.0, side="right"))
    if taken == 0:
        return float("inf"), float(max(before[0], device_backlog / device_slots))
    drain = float(max(device_done[taken - 1], cpu_done[taken - 1]))
    if taken == cpu_costs.size:
        return 0.0, drain
    return float(ratios[order[taken - 1]] + ratios[order[taken]]) / 2, drain


class Router:
    """The current threshold of one loader run, and what a lane without work of its own may take from the others."""

    def __init__(self, policy: Policy, lanes: Mapping[str, LaneState], waiting: Waiting) -> None:
        self.threshold = float("inf")
        self.price = 1.0  # what a second of device work counts
        self.spared = False  # devices are to get nothing
        self.promised = 0.0  # device seconds of what runs on the CPU lane and will be handed over
        self._policy = policy
        self._lanes = lanes
        self._waiting = waiting

    def update(self, rank: Callable[[Entry], None]) -> None:
        """Recompute the threshold from the window's costs and the lanes' backlogs, and move what changes sides."""
        if not (self._policy.threshold and self._policy.cpu_runs):  # there is nothing to choose
            return
        if not any(lane.is_device for lane in self._lanes.values()):
            return
        homes, entries = self._waiting.homes, list(self._waiting.costed())
        closed = [home for home in homes if not self._open(home)]
        if len(closed) == len(homes):
            self.threshold = float("inf")  # what comes next must not wait for a device that is gone
        elif served := [entry for entry in entries if entry.home not in closed]:
            left = sum(entry.cpu or 0.0 for entry in entries if entry.home in closed)
            self.threshold = self._balance(served, left)
        if entries:
            self._waiting.move(self.threshold, rank, closed)

    def _balance(self, entries: Sequence[Entry], left: float) -> float:
        """The threshold for these; ``left``: seconds of the CPU that what no device could take needs."""
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
            0 if self._leaves_alone() else device_slots,
            left + more + cpu_s,
            self.price * device_s,
        )
        return ratio * self.price

    def _leaves_alone(self) -> bool:
        """Whether devices get nothing: the CPU's lanes keep up, and there is one that runs."""
        if self.spared and self._policy.cpu_runs:
            for lane in self._lanes.values():
                if lane.slots > 0 and not lane.is_device:
                    return True
        return False

    def cut(self, entry: Entry) -> Plan | None:
        """Where a CPU slot that takes the entry should hand it over; None: nowhere."""
        return None if entry.steps is None or self.no_device(entry.home) else entry.cut(self.threshold)

    def beyond(self, entry: Entry) -> bool:
        """Whether the entry is on the device's side of the threshold, and its device is there."""
        return self._policy.threshold and entry.ratio >= self.threshold and bool(self._open(entry.home))

    def may_rescue(self, entry: Entry) -> bool:
        """Whether a device could go on with the sample."""
        ahead = any(plan.split > entry.at for plan in entry.between)
        return ahead and self._policy.rescue and not self.no_device(entry.home)

    def rescues(self, entry: Entry, factor: float, since_s: float) -> tuple[int, ...]:
        """The split points from which a device would be through with a sample before the CPU, where it has run for
        ``since_s``; only where there is a plan does a device take it.

        That is ``factor`` times what was predicted, so the rest is taken to be as much too long; on the CPU as much
        may follow as has passed, which is what heavy tails do.
        """
        if not self.may_rescue(entry):
            return ()
        devices = self._open(entry.home)
        queued = sum(lane.seconds for lane in devices)  # not what waits: it would be among the oldest
        wait = queued / sum(lane.slots for lane in devices)
        return tuple(
            plan.split
            for plan in entry.between
            if plan.split > entry.at and plan.laying + self.price * (wait + factor * plan.device) < since_s
        )

    def no_device(self, home: str) -> bool:
        """Whether no device lane of this side is to get anything."""
        return self._leaves_alone() or not self._open(home)

    def _open(self, home: str) -> list[LaneState]:
        """The device lanes of this side that take work."""
        return [lane for lane in self._lanes.values() if lane.home == home and lane.slots > 0]

    def steal(self, thief: LaneState, newest: int) -> tuple[Entry, Plan | None] | None:
        """The ticket nearest to the threshold that the thief would finish before its own side; None if there is none.

        With it, where a CPU slot should hand it over. When the own side would come to it is estimated from how far back
        it stands among the serials up to ``newest``.
        """
        if thief.is_device:
            return None if self._leaves_alone() else self._steal_from(CPU, thief.home, thief, newest)
        for home in sorted(self._waiting.homes, key=lambda home: -self._waiting.seconds(home)):
            found = self._steal_from(home, home, thief, newest)
            if found is not None:
                return found
        return None

    def _steal_from(self, owner: str, home: str, thief: LaneState, newest: int) -> tuple[Entry, Plan | None] | None:
        """The same from one side, among the tickets of one home."""
        owners = [lane for lane in self._lanes.values() if lane.side == owner]
        slots = sum(lane.slots * lane.speed for lane in owners)
        if slots <= 0:
            entry = self._waiting.nearest(owner, home)
            return None if entry is None else (entry, None if thief.is_device else self.cut(entry))
        oldest = self._waiting.oldest()
        first = oldest.lo if oldest is not None else 0
        running = sum(lane.seconds * lane.speed for lane in owners)
        per_position = self._waiting.seconds(owner) / max(1, newest - first)
        for entry in self._waiting.near(owner, home):
            device, cpu = self.price * (entry.device or 0.0), entry.cpu or 0.0
            wait = (running + per_position * (entry.lo - first)) / slots
            if thief.is_device:
                plan = self.cut(entry)
                if device <= wait + (cpu if plan is None else plan.cpu + self.price * plan.device):
                    return entry, None
                continue
            if entry.steps is not None and len(entry.steps) > 1:
                plan = entry.steps[-2].plan  # the last before all on the device
                if max(plan.cpu, wait) + self.price * plan.device <= wait + device:
                    return entry, plan
            if cpu <= wait + device:
                return entry, None
        return None


def _steps(entries: Sequence[Entry]) -> tuple[list[float], list[float], float]:
    """What each step saves and costs, and the CPU's seconds of those that the device cannot take altogether."""
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
