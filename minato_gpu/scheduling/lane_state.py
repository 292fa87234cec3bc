"""What the scheduler knows about one lane: its slots, its load, and what samples cost there."""

from __future__ import annotations

from math import ceil, sqrt

from minato_gpu.scheduling.messages import CPU, Chunk, LaneCosts
from minato_gpu.scheduling.micro_batch_cost import MicroBatchCost
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
_REMEMBERED = 0.98  # of what a lane's speed was learned from, with each report,
_FASTEST = 32.0  # times the speed of this host's, at most
_LEASES = 8  # that the seconds of a lease are a mean of
_OVER_FIXED = 2.0  # times what a micro-batch takes beside its samples, these may take


class LaneState:
    """Load and measured mean cost of one lane; ``mean`` is seconds per sample on one slot.

    A lane of this host is the measure of its kind: predicted costs are those of its slots. Another has a ``speed``
    against that, and a lease takes it ``lease_s`` seconds beside its samples: the way there and back. Both are learned.
    Seconds are the lane's own, but where it is said that they are its kind's.

    ``kind``: CPU or DEVICE. ``home``: the side that is meant for it (see ``waiting``); ``side``: where what it takes
    waits, which is the CPU's for every lane where nothing is routed. ``wants_many``: a GPU, which takes some time for a
    dispatch, whatever is in it. ``helps``: it reads for others, and joins batches.
    """

    def __init__(
        self, name: str, kind: str, policy: Policy, known: LaneCosts | None = None, *, on_host: bool = True
    ) -> None:
        self.name = name
        self.slots = 0
        self.is_device = kind == DEVICE
        self.helps = on_host and not self.is_device
        self.learns = not on_host
        self.home = name if self.is_device and policy.pins else kind
        self.side = self.home if policy.threshold else CPU
        self.seconds = 0.0
        self._policy = policy
        self._least_ahead = policy.device_ahead if self.is_device else 1
        self.wants_many = self._least_ahead > 1
        self._micro_batches = MicroBatchCost(policy.micro_batch) if self.wants_many else None
        self._chunks = 0
        self.slow: set[int] = set()  # chunks of one predicted-slow sample
        known = known or LaneCosts(0, 0.0, 0.0)
        self._measurements, self.mean, self._variance, self.speed, self.lease_s = known
        self._own_mean = self.mean  # without waits for a core
        self._predicted = self._took = 0.0  # seconds of late, of its kind and its own
        self._leases = 0  # that were timed, up to _LEASES
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
            self.slow.add(chunk.number)

    def remove(self, chunk: Chunk) -> None:
        """The lane is through with the chunk."""
        self._chunks -= 1
        self.slow.discard(chunk.number)
        self.seconds = self.seconds - chunk.seconds if self._chunks else 0.0

    def shorten(self, seconds: float) -> None:
        """So many predicted seconds of a chunk were taken back."""
        self.seconds -= seconds

    def measured(self, seconds: float, samples: int, own_s: float | None = None) -> None:
        """``samples`` samples took ``seconds`` together, and ``own_s`` without what their slot has waited for a core:
        how unlike they are is theirs. Those of a GPU count as in a full micro-batch: else one that was given few while
        it was slow to begin would look slow, and be given few for long."""
        if self._micro_batches is not None:
            seconds = self._micro_batches.of_samples(samples, seconds)
            target = max(self._policy.device_s, _OVER_FIXED * self._micro_batches.fixed_s)
            self.limits = self._policy.micro_batch, target
        self._measurements += samples
        weight = max(samples / (samples + 100), samples / self._measurements)
        self.mean += (seconds / samples - self.mean) * weight
        error = (seconds if own_s is None else own_s) / samples - self._own_mean
        self._own_mean += error * weight
        if self._measurements > samples:
            self._variance += (samples * error * error - self._variance) * weight
        self._find_even()

    def compared(self, predicted: float, seconds: float) -> None:
        """What took ``seconds`` was predicted to take slots of its kind so long."""
        self._predicted = _REMEMBERED * self._predicted + predicted
        self._took = _REMEMBERED * self._took + seconds
        if self._predicted > 0 < self._took:
            self.speed = min(max(self._predicted / self._took, 1 / _FASTEST), _FASTEST)

    def lease_took(self, seconds: float) -> None:
        """A lease that a free slot was given was under way for so long beside its samples."""
        self._leases = min(self._leases + 1, _LEASES)
        self.lease_s += (max(seconds, 0.0) - self.lease_s) / self._leases

    def _find_even(self) -> None:
        """Whether samples are known to cost much the same, so that many together take what is predicted; or to be
        unlike, so that few of them make up most of the work."""
        self.even = self._measurements >= _EVEN_AFTER and self._variance <= (_EVEN * self.mean) ** 2
        self.unlike = self._measurements >= _KNOWN and self._variance > (_UNLIKE * self.mean) ** 2

    @property
    def costs(self) -> LaneCosts:
        """What has been measured."""
        return LaneCosts(self._measurements, self.mean, self._variance, self.speed, self.lease_s)

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
        """Seconds of its kind that each sample of the entry takes; 0.0 when nothing is known yet."""
        cost = entry.device if self.is_device else entry.cpu
        return self.mean * self.speed if cost is None else cost

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
        ahead = ceil(self.slots * (self._policy.ahead_s + self.lease_s) / each) if each > 0 else self.slots
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
        return self.lease_s + self.seconds / self.slots if self.slots > 0 else 0.0
