"""``LaneState``: what the scheduler knows about one lane: its slots, its load, and measured costs."""

from __future__ import annotations

from math import ceil, sqrt

from minato_gpu.scheduling.messages import Chunk, LaneCosts
from minato_gpu.scheduling.micro_batch_cost import MicroBatchCost
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.waiting import DEVICE, Entry

LONGEST_LEASE_S = 50e-3  # most work of a lease of cheap samples
LONGEST_QUEUED_S = 250e-3  # most work of a lease of costly samples behind which others may queue
_KNOWN = 32  # samples after which a mean is reliable, or twice the slots if fewer
_P90 = 1.28  # standard deviations
_CHEAP_S = 100e-6
_UNIFORM = 0.6  # standard deviation over mean, at most
_UNIFORM_AFTER = 256  # samples
_VARIED = 1.0  # standard deviation over mean, at least
_REMEMBERED = 0.98  # forgetting factor of a lane's speed, per report
_FASTEST = 32.0  # most times the speed of this host
_LEASES = 8  # leases that ``lease_s`` averages over
_CHUNK_SAMPLES = 1024  # most samples of a dispatch to CPU workers
_OVER_FIXED = 2.0  # a dispatch may take this many times the fixed seconds of a micro-batch


class LaneState:
    """Load and measured costs of one lane.

    A lane of this host sets the scale of its kind: predicted costs are those of its slots. A remote lane has a learned
    ``speed`` relative to that, and a learned ``lease_s`` (round trip). Seconds are the lane's own unless stated to be
    its kind's, those of a slot of this host. ``known``: costs measured in an earlier run (None: none).
    """

    def __init__(
        self, name: str, kind: str, policy: Policy, known: LaneCosts | None = None, *, on_host: bool = True
    ) -> None:
        self.name = name
        self.slots = 0
        self.is_device = kind == DEVICE
        self.helps = on_host and not self.is_device  # it inspects for other lanes and collates batches
        self.learns = not on_host  # its speed is learned
        self.home = name if self.is_device and policy.pins else kind  # side on which its tickets wait, see ``waiting``
        self.seconds = 0.0  # predicted, of the chunks that it holds
        self._policy = policy
        self._least_ahead = policy.device_ahead if self.is_device else 1
        self.wants_many = self._least_ahead > 1  # a GPU, for which a dispatch has a fixed cost
        self._micro_batches = MicroBatchCost(policy.micro_batch) if self.wants_many else None
        self._chunks = 0
        self.slow: set[int] = set()  # chunks of one predicted-slow sample
        known = known or LaneCosts(0, 0.0, 0.0)
        self._measurements, self.mean, self._variance, self.speed, self.lease_s = known
        self.own_mean = self.mean  # seconds of a sample without waits for a core
        self._predicted = self._took = 0.0  # recent seconds, predicted of its kind and measured
        self._leases = 0  # timed leases, up to _LEASES
        self._update_spread()
        # the most samples of one dispatch, and its target in predicted seconds
        self.limits = (policy.micro_batch, policy.device_s) if self.is_device else (_CHUNK_SAMPLES, policy.chunk_s)

    def add(self, chunk: Chunk, slow: bool = False) -> None:
        """Counts a chunk that is sent to the lane; ``slow``: it is one sample predicted slow."""
        self._chunks += 1
        self.seconds += chunk.seconds
        if slow:
            self.slow.add(chunk.number)

    def remove(self, chunk: Chunk) -> None:
        """Removes a chunk that the lane has ended."""
        self._chunks -= 1
        self.slow.discard(chunk.number)
        self.seconds = self.seconds - chunk.seconds if self._chunks else 0.0

    def measured(self, seconds: float, samples: int, own_s: float | None = None) -> None:
        """Updates mean and variance: ``samples`` samples took ``seconds`` in all, ``own_s`` without waits for a core
        (None: the same). On a GPU they were one micro-batch.

        The variance is that of ``own_s``. A GPU's samples count as in a full micro-batch: otherwise a lane that was
        given few at once would look slow, and be given few for long.
        """
        if self._micro_batches is not None:
            seconds = self._micro_batches.of_samples(samples, seconds)
            target = max(self._policy.device_s, _OVER_FIXED * self._micro_batches.fixed_s)
            self.limits = self._policy.micro_batch, target
        self._measurements += samples
        weight = max(samples / (samples + 100), samples / self._measurements)
        self.mean += (seconds / samples - self.mean) * weight
        error = (seconds if own_s is None else own_s) / samples - self.own_mean
        self.own_mean += error * weight
        if self._measurements > samples:
            self._variance += (samples * error * error - self._variance) * weight
        self._update_spread()

    def compared(self, predicted: float, seconds: float) -> None:
        """Updates ``speed`` from work that took ``seconds`` and was predicted to take ``predicted`` on slots of this
        host."""
        self._predicted = _REMEMBERED * self._predicted + predicted
        self._took = _REMEMBERED * self._took + seconds
        if self._predicted > 0 < self._took:
            self.speed = min(max(self._predicted / self._took, 1 / _FASTEST), _FASTEST)

    def lease_took(self, seconds: float) -> None:
        """Updates ``lease_s`` from a lease whose time beside its samples was ``seconds``."""
        self._leases = min(self._leases + 1, _LEASES)
        self.lease_s += (max(seconds, 0.0) - self.lease_s) / self._leases

    def _update_spread(self) -> None:
        """Sets ``uniform`` when samples are known to cost nearly the same, so that sums can be predicted, and
        ``varied`` when few of them make up most of the work."""
        self.uniform = self._measurements >= _UNIFORM_AFTER and self._variance <= (_UNIFORM * self.mean) ** 2
        self.varied = self._measurements >= _KNOWN and self._variance > (_VARIED * self.mean) ** 2

    @property
    def costs(self) -> LaneCosts:
        """The measured costs."""
        return LaneCosts(self._measurements, self.mean, self._variance, self.speed, self.lease_s)

    @property
    def typical(self) -> float:
        """Seconds that nine in ten samples stay below, assuming normally distributed costs; 0.0 while unknown.

        For cheap samples, which are reported by the hundred, it is the mean, because their variance cannot be seen.
        """
        if self._measurements < min(_KNOWN, 2 * self.slots):
            return 0.0
        return self.mean if self.cheap else self.mean + _P90 * sqrt(self._variance)

    @property
    def cheap(self) -> bool:
        """True when samples take under 100 microseconds on average, without waits for a core, so that leases end soon;
        also while none is known."""
        return self.own_mean < _CHEAP_S

    def predict(self, entry: Entry) -> float:
        """Returns the seconds per sample of the entry on its kind of lane; 0.0 when nothing is known."""
        cost = entry.device if self.is_device else entry.cpu
        return self.mean * self.speed if cost is None else cost

    @property
    def idle(self) -> int:
        """Slots without a chunk."""
        return max(0, self.slots - self._chunks)

    def wants_more(self, *, low: bool = False) -> bool:
        """Returns True when a slot is free, or the work held ahead would not last a round trip. ``low``: only when half
        of that work has been taken."""
        count = self._chunks
        return count < self.slots or (self.slots > 0 and count - self.slots < self._ahead(low=low))

    def _ahead(self, *, low: bool) -> int:
        """Returns how many chunks the lane should hold beside those at work."""
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
        """Chunks that the lane holds, and their predicted seconds."""
        return self._chunks, self.seconds

    def backlog_s(self) -> float:
        """Returns the predicted seconds until a chunk sent now starts; 0.0 without slots."""
        return self.lease_s + self.seconds / self.slots if self.slots > 0 else 0.0
