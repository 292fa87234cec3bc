"""``Pace``: when a ticket should start: which samples are slow, how early they begin, and how long leases are.

All lanes together take ``tau`` seconds per sample on average, so c / tau others are prepared while a sample of cost c
runs. It should start that many positions before its place, and then ends with the others of its batch. This is least
slack time first (Mok 1983) in units of positions, so that no clock is needed; within a place it is longest processing
time first (Graham 1969).

Rejected: MinatoLoader's time-out at a percentile, after which a sample counts as slow. It decides after the time has
been lost; a prediction decides before the sample starts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from minato_gpu.scheduling.lane_state import LONGEST_LEASE_S, LONGEST_QUEUED_S
from minato_gpu.scheduling.plans import Step
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.routing import threshold

_MEMORY = 256  # recent samples from which tau is computed
PATIENT = 1.0  # share of the window that may pass while one sample runs
SLOW_FACTOR = 2.0  # a slow sample takes at least this many times the mean
SLOW_BATCHES = 2.0  # a slow sample takes longer than this many batches
MANY_SLOTS = 8  # with fewer slots proportionally fewer, since it takes a larger share of them
EARLY_SLOTS = 4  # with fewer, a head start lets two slow samples hold every slot: 0.01 worse on the tail benchmark
HUNGRY_BATCHES = 8  # with fewer batches ready the consumer is close to waiting
UNIFORM_SHARE = 0.5  # share of the window's time for a lease of samples of nearly equal cost
LONGEST_UNIFORM_S = 0.5  # longest such lease
LEEWAY = 1.1  # such a lease may exceed the mean of a place by this factor
LEAST_TICKETS = 8  # a lease may be longer than ``LONGEST_LEASE_S`` to hold this many costly samples
DEFER = 0.75  # share of the lateness by which a slow sample may be deferred


class Pace:
    """Estimates how long all lanes together need per sample, and derives start priorities and lease lengths."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._recent: deque[tuple[float, float]] = deque(maxlen=_MEMORY)
        self._fresh = 0
        self._seen = 0
        self._cuttable: deque[tuple[int, Sequence[Step]]] = deque(
            maxlen=_MEMORY
        )  # with their numbers among the samples seen
        self.slots = 0  # slots of all lanes
        self.cpu_slots = 0
        self.cpu_capacity = 0.0  # capacity of the CPU lanes, in slots of this host
        self.batch = 1  # samples of a place
        self.window = policy.window  # in tickets
        self.ending = False  # the sampler's last batch has been admitted
        self.tau = 0.0  # seconds per sample of all lanes together; 0.0: unknown
        self.cpu_tau = 0.0  # seconds per sample of the CPU lanes alone

    def expect(self, cpu: float, device: float | None, samples: int) -> None:
        """Adds ``samples`` admitted samples that are predicted to cost so many seconds each; ``device``: None without
        one."""
        self._seen += samples
        self._recent.extend([(cpu, cpu if device is None else device)] * min(samples, _MEMORY))
        self._fresh += samples
        if self._fresh >= min(_MEMORY, 1 + len(self._recent) // 2):
            self.measure()

    def expect_each(self, costs: Sequence[tuple[float, float | None, Sequence[Step] | None]]) -> None:
        """Adds admitted samples with their predicted costs on CPU and device, and their steps if they can be
        divided."""
        for cpu, device, steps in costs:
            if steps is not None:
                self._cuttable.append((self._seen, steps))
            self._seen += 1
            self._recent.append((cpu, cpu if device is None else device))
        self._fresh += len(costs)
        if self._fresh >= min(_MEMORY, 1 + len(self._recent) // 2):
            self.measure()

    def measure(self) -> None:
        """Recomputes ``tau`` and ``cpu_tau`` from the predicted costs of the recent samples."""
        self._fresh = 0
        if self._recent and self.slots:
            cpu, device = zip(*self._recent, strict=True)
            self.tau = self._drain(list(cpu), list(device)) / len(cpu)
            self.cpu_tau = sum(cpu) / len(cpu) / self.cpu_capacity if self.cpu_capacity else 0.0

    def _drain(self, cpu: list[float], device: list[float]) -> float:
        """Returns the seconds in which all lanes would prepare the recent samples, some of which can be divided."""
        begin, left = self._seen - len(cpu), 0.0
        while self._cuttable and self._cuttable[0][0] < begin:
            self._cuttable.popleft()
        for number, steps in self._cuttable:
            cpu[number - begin] = device[number - begin] = 0.0
            cpu += [step.cpu for step in steps]
            device += [step.device for step in steps]
            left += steps[-1].plan.cpu
        return threshold(cpu, device, self.cpu_capacity, self.slots - self.cpu_slots, left)[1]

    def slow_s(self) -> float:
        """Returns the seconds from which a sample is slow: much longer than the others, and long enough to delay a
        batch. Infinity while ``tau`` is unknown."""
        if self.tau <= 0:
            return float("inf")
        batches = SLOW_BATCHES * min(1.0, self.slots / MANY_SLOTS)
        return self.tau * max(batches * self.batch, SLOW_FACTOR * self.slots)

    def lease_s(self, each: float, window: int, *, uniform: bool = False) -> float:
        """Returns the seconds of work that a slot is given at once: a share of the time of the whole window.

        Each lease costs the training process a wake-up and a decision, so it is long where much is admitted ahead and
        short where little is.

        Args:
            each: mean seconds of a sample, used while no costs have been predicted.
            window: tickets, as far as memory allows.
            uniform: samples cost nearly the same, so that a slot can be given a whole place and all slots end in time.
        """
        mean = self.cpu_tau * self.cpu_capacity or each
        window_s = (self.tau or each / max(self.cpu_capacity, 1)) * window
        longest = max(LONGEST_LEASE_S, min(LEAST_TICKETS * mean, LONGEST_QUEUED_S))
        lease = min(window_s * self._policy.lease_share, longest)
        whole = LEEWAY * min(window_s * UNIFORM_SHARE, self.batch * mean)
        return max(lease, min(whole, LONGEST_UNIFORM_S)) if uniform else lease

    def defer(self, samples_ready: int) -> float:
        """Returns by how many positions slow tickets start later than their priority.

        A consumer with little prepared gets fast samples first, within the lateness and the window; with a few batches
        in hand slow samples start early. It is 0 in strict order and at the end of the data.
        """
        if self.ending or samples_ready >= HUNGRY_BATCHES * self.batch:
            return 0.0
        return DEFER * min(self._policy.max_lateness * self.batch, self._policy.window)

    def priority(self, base: int, cost: float, cold: bool) -> float:
        """Returns the position at which a ticket starts; lower ones first. ``base``: the first serial of its place.

        ``cold``: the consumer has nothing yet and batches are composed of what is ready, so fast samples go first; a
        slow one still starts before half of its lateness has passed.
        """
        if not self._policy.early or self.tau <= 0 or self.slots < EARLY_SLOTS:
            return float(base)
        lead = cost / self.tau
        if not cold:
            return base - lead
        return base + min(lead, max(-lead, self._policy.max_lateness * self.batch / 2 - lead))

    def patience(self) -> float:
        """Returns the seconds beyond which a sample would hold up the window even if started when admitted; infinity
        while ``tau`` is unknown."""
        positions = PATIENT * self._policy.window + self._policy.max_lateness * self.batch
        return positions * self.tau if self.tau > 0 else float("inf")
