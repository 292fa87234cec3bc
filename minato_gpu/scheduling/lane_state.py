"""What the scheduler knows about one lane: its slots, its load, and what samples cost there."""

from __future__ import annotations

from math import ceil, sqrt

from minato_gpu.scheduling.messages import CPU, Chunk, LaneCosts
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.waiting import DEVICE, Entry

LONGEST_LEASE_S = 50e-3  # a lease of cheap samples is worth no more
LONGEST_QUEUED_S = 250e-3  # nor one of costly samples, if others wait in its slot
_KNOWN = 32  # samples after which a lane's mean is one; with few slots twice as many as these
_P90 = 1.28  # standard deviations
_CHEAP_S = 100e-6
_EVEN = 0.6  # standard deviation over mean
_EVEN_AFTER = 256
_UNLIKE = 1.0


class LaneState:
    """Load and measured mean cost of one lane; ``mean`` is seconds per sample on one slot.

    ``kind``: CPU or DEVICE. ``home``: the side that is meant for it (see ``waiting``); ``side``: where what it takes
    waits, which is the CPU's for every lane where nothing is routed.
    """

    def __init__(self, name: str, kind: str, policy: Policy, known: LaneCosts | None = None) -> None:
        self.name = name
        self.slots = 0
        self.is_device = kind == DEVICE
        self.home = name if self.is_device and policy.pins else kind
        self.side = self.home if policy.threshold else CPU
        self.seconds = 0.0
        self._policy = policy
        self._least_ahead = policy.device_ahead if self.is_device else 1
        self._chunks = 0
        self._slow: set[int] = set()
        self._measurements, self.mean, self._variance = known or (0, 0.0, 0.0)  # the variance: of what one sample takes
        self._find_even()
        # the most samples of one dispatch, and its target in predicted seconds
        self.limits = (
            (policy.micro_batch, policy.device_s) if self.is_device else (policy.chunk_samples, policy.chunk_s)
        )

    def add(self, chunk: Chunk, slow: bool = False) -> None:
        """The chunk is on its way to the lane; ``slow``: it is one predicted-slow sample."""
        self._chunks += 1
        self.seconds += chunk.seconds
        if slow:
            self._slow.add(chunk.number)

    def remove(self, chunk: Chunk) -> None:
        """The lane is through with the chunk."""
        self._chunks -= 1
        self._slow.discard(chunk.number)
        self.seconds = self.seconds - chunk.seconds if self._chunks else 0.0

    def shorten(self, seconds: float) -> None:
        """So many predicted seconds of a chunk were taken back."""
        self.seconds -= seconds

    def measured(self, seconds: float, samples: int) -> None:
        """``samples`` samples took ``seconds`` together."""
        self._measurements += samples
        weight = max(samples / (samples + 100), samples / self._measurements)
        error = seconds / samples - self.mean
        self.mean += error * weight
        if self._measurements > samples:
            self._variance += (samples * error * error - self._variance) * weight
        self._find_even()

    def _find_even(self) -> None:
        """Whether samples are known to cost much the same, so that many together take what is predicted; or to be
        unlike, so that few of them make up most of the work."""
        self.even = self._measurements >= _EVEN_AFTER and self._variance <= (_EVEN * self.mean) ** 2
        self.unlike = self._measurements >= _KNOWN and self._variance > (_UNLIKE * self.mean) ** 2

    @property
    def costs(self) -> LaneCosts:
        """What has been measured."""
        return LaneCosts(self._measurements, self.mean, self._variance)

    @property
    def typical(self) -> float:
        """What nine of ten samples take no longer than, were costs normally distributed; 0.0 while it is not known.

        Of samples that are told by the hundred it is the mean: how these differ from each other does not show.
        """
        if self._measurements < min(_KNOWN, 2 * self.slots):
            return 0.0
        return self.mean if self.cheap else self.mean + _P90 * sqrt(self._variance)

    @property
    def cheap(self) -> bool:
        """Whether samples come by the hundred, in leases that end soon."""
        return self.mean < _CHEAP_S

    def predict(self, entry: Entry) -> float:
        """Seconds that each sample of the entry takes here; 0.0 when nothing is known yet."""
        cost = entry.device if self.is_device else entry.cpu
        return self.mean if cost is None else cost

    def slow_slots_taken(self) -> bool:
        """Whether slow work holds all slots but one (a lane with one slot has none to reserve)."""
        return self.slots > 1 and len(self._slow) >= self.slots - 1

    @property
    def idle(self) -> int:
        """Slots without a chunk."""
        return max(0, self.slots - self._chunks)

    def wants_more(self, *, low: bool = False) -> bool:
        """Whether a slot is free, or the work held ahead would not last a round trip; ``low``: and half of that has
        been taken, so that the lane should be given more, until it wants none."""
        count = self._chunks
        return count < self.slots or (self.slots > 0 and count - self.slots < self._ahead(low=low))

    def _ahead(self, *, low: bool) -> int:
        """How many chunks it should hold beside those that its slots are at."""
        if self._policy.ahead_s <= 0:
            return 0
        each = self.seconds / self._chunks
        ahead = ceil(self.slots * self._policy.ahead_s / each) if each > 0 else self.slots
        if self._policy.queues and not self.is_device and each <= LONGEST_QUEUED_S:
            # one wake-up of the training process then serves many slots, and neighbours wait to travel together
            ahead = max(ahead, self.slots // 2) // (2 if low else 1)
        return min(max(self._least_ahead, ahead), 4 * self.slots)

    @property
    def load(self) -> tuple[int, float]:
        """What it holds: chunks, and their predicted seconds."""
        return self._chunks, self.seconds

    def backlog_s(self) -> float:
        """Predicted seconds until a chunk that is sent now starts."""
        return self.seconds / self.slots if self.slots > 0 else 0.0
