"""When a ticket should start: what is slow, how early a slow one begins, and how much of the lanes it may take.

A sample is due when its place is. Over all lanes together a sample takes ``tau`` seconds on average, so while one of
cost c runs, c / tau others are prepared: it should start that many positions before its place, and then it ends with
the others of its batch. In other words the ticket with the least slack starts first (least slack time first; Mok 1983),
in units of positions so that no clock is needed. Within a place this is longest processing time first (Graham 1969).

Rejected: MinatoLoader's time-out at a percentile, after which a sample counts as slow: it decides only after the time
has been lost, where a prediction decides before the sample starts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from minato_gpu.scheduling.lane_state import LONGEST_LEASE_S, LONGEST_QUEUED_S
from minato_gpu.scheduling.plans import Step
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.routing import threshold

_MEMORY = 256  # recent samples that tau is taken from
PATIENT = 1.0  # share of the window that may pass while one sample runs
SLOW_BATCHES = 2.0  # a slow sample takes longer than this many batches do,
MANY_SLOTS = 8  # or, on fewer slots than these, proportionally fewer: there it takes more of the capacity with it
EARLY_SLOTS = 4  # with fewer, a head start lets two slow samples hold every slot: 0.01 worse on the tail benchmark
HUNGRY_BATCHES = 8  # with fewer batches in hand the consumer is close to waiting
EVEN_SHARE = 0.5  # of the window's time, for a lease of samples that take much the same
LONGEST_EVEN_S = 0.5  # of such a lease
LEEWAY = 1.1  # so much more than a whole place's mean may be predicted for it
LEAST_TICKETS = 8  # samples of a lease where they cost so much that it may be longer than others,
DEFER = 0.75  # share of the lateness by which a slow sample may then wait


class Pace:
    """How long all lanes together need for one sample, and what follows from it for each."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._recent: deque[tuple[float, float]] = deque(maxlen=_MEMORY)
        self._fresh = 0
        self._seen = 0
        self._cuttable: deque[tuple[int, Sequence[Step]]] = deque(maxlen=_MEMORY)  # with their numbers among those seen
        self.slots = 0  # of all lanes
        self.cpu_slots = 0
        self.cpu_capacity = 0.0  # the same, in slots of this host
        self.batch = 1  # samples of a place
        self.window = policy.window  # in tickets
        self.ending = False  # the sampler's last batch has been admitted
        self.tau = 0.0
        self.cpu_tau = 0.0  # the same for the CPU's lanes alone

    def expect(self, cpu: float, device: float | None, samples: int) -> None:
        """``samples`` with these predicted costs were admitted."""
        self._seen += samples
        self._recent.extend([(cpu, cpu if device is None else device)] * min(samples, _MEMORY))
        self._fresh += samples
        if self._fresh >= min(_MEMORY, 1 + len(self._recent) // 2):
            self.measure()

    def expect_each(self, costs: Sequence[tuple[float, float | None, Sequence[Step] | None]]) -> None:
        """Samples with these predicted costs on the CPU and on a device were admitted; with steps: that can be cut."""
        for cpu, device, steps in costs:
            if steps is not None:
                self._cuttable.append((self._seen, steps))
            self._seen += 1
            self._recent.append((cpu, cpu if device is None else device))
        self._fresh += len(costs)
        if self._fresh >= min(_MEMORY, 1 + len(self._recent) // 2):
            self.measure()

    def measure(self) -> None:
        """Compute ``tau`` anew: the time in which all lanes would prepare the recent samples, shared out."""
        self._fresh = 0
        if self._recent and self.slots:
            cpu, device = zip(*self._recent, strict=True)
            self.tau = self._drain(list(cpu), list(device)) / len(cpu)
            self.cpu_tau = sum(cpu) / len(cpu) / self.cpu_capacity if self.cpu_capacity else 0.0

    def _drain(self, cpu: list[float], device: list[float]) -> float:
        """The seconds in which all lanes would prepare the recent samples, some of which can be cut."""
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
        """From where on a sample is slow: it takes much longer than the others, and long enough to keep a batch from
        the consumer."""
        if self.tau <= 0:
            return float("inf")
        batches = SLOW_BATCHES * min(1.0, self.slots / MANY_SLOTS)
        return self.tau * max(batches * self.batch, self._policy.slow_factor * self.slots)

    def lease_s(self, each: float, window: int, *, even: bool = False) -> float:
        """Seconds of work that a slot is given at once: a share of the time that the whole window takes.

        Every lease costs the training process a wake-up and the scheduler a decision, whatever it is worth; so it is
        long where much is admitted ahead, and short where little is. ``each``: what a sample takes on average, for
        while no costs have been predicted; ``window``: in tickets, as far as memory allows it. ``even``: samples take
        much the same, so that a slot can be given a whole place at once, and all slots are through with theirs in time.
        """
        mean = self.cpu_tau * self.cpu_capacity or each
        window_s = (self.tau or each / max(self.cpu_capacity, 1)) * window
        longest = max(LONGEST_LEASE_S, min(LEAST_TICKETS * mean, LONGEST_QUEUED_S))
        lease = min(window_s * self._policy.lease_share, longest)
        whole = LEEWAY * min(window_s * EVEN_SHARE, self.batch * mean)
        return max(lease, min(whole, LONGEST_EVEN_S)) if even else lease

    def defer(self, samples_ready: int) -> float:
        """By how many positions slow tickets should start later than they ask.

        A consumer that finds little prepared is fed with fast samples first, as long as the lateness and the window can
        take it; with a few batches in hand slow work starts early. Never in strict order, nor at the end of the data.
        """
        if self.ending or samples_ready >= HUNGRY_BATCHES * self.batch:
            return 0.0
        return DEFER * min(self._policy.max_lateness * self.batch, self._policy.window)

    def priority(self, base: int, cost: float, cold: bool) -> float:
        """The position at which a ticket starts: lower ones first. ``base`` is the first serial of its place.

        ``cold``: the consumer has nothing yet and batches are composed of what is ready, so that the fast ones
        should come first; a slow one still starts before half of its lateness has passed.
        """
        if not self._policy.early or self.tau <= 0 or self.slots < EARLY_SLOTS:
            return float(base)
        lead = cost / self.tau
        if not cold:
            return base - lead
        return base + min(lead, max(-lead, self._policy.max_lateness * self.batch / 2 - lead))

    def patience(self) -> float:
        """Seconds beyond which a sample would hold up the window although it started when it was admitted."""
        positions = PATIENT * self._policy.window + self._policy.max_lateness * self.batch
        return positions * self.tau if self.tau > 0 else float("inf")
