"""What the scheduler may and should do."""

from __future__ import annotations

from dataclasses import dataclass

from minato_gpu.scheduling.messages import DEVICE


@dataclass(frozen=True, slots=True)
class Policy:
    """What the scheduler may and should do; fixed for one run.

    ``window``: tickets admitted and not delivered. ``fixed``: batches keep the sampler's composition; otherwise they
    are composed from what is ready. ``max_lateness`` in batches (0: the sampler's order). ``budget_bytes``: host bytes
    in flight, None for no limit. ``joins``: a batch is joined by a worker, and one that prepares all of its samples
    need not lay them down for another. ``inspect``: read headers first where costs are unknown and a device lane is
    open. ``cpu_runs``: without it the CPU lane only reads (``inspect``) and joins, and devices
    prepare every sample. ``chunk_s``: the least that a dispatch is worth where samples are that cheap, in predicted
    seconds; ``chunk_samples``: the most samples of one; ``lease_share``: of the time that the window takes, what a slot
    is given at once.
    ``ahead_s``: seconds of work each slot holds ahead of need; ``queues``: on the CPU a whole lease, if leases are not
    long (where batches are to be joined these would wait behind them). ``slow_factor``: a sample is slow when it costs
    this many times the mean (and more than a batch or two take). ``early``: start predicted-slow samples early.
    ``reserve``: out of order, slow work never takes every slot. ``threshold``: route by the window's threshold;
    otherwise first come, first served. ``micro_batch``: most samples of one device chunk; ``device_s``: its target.
    ``compose_ahead``: while fewer batches than this are composed and not delivered, one is composed even if it
    overtakes an older sample, so that assembly overlaps with the consumer's step. ``spares_device``: the device trains
    too, so its work is priced by what it adds to the step, and it gets none while the CPU lane keeps up. ``rescue``:
    the rest of a sample that turns out slow on the CPU is moved to a device that would sooner be through with it.
    ``devices``: batches go to so many in turn, each with a lane of its own, ``device:n``. In strict order that one
    prepares samples of places that go to number n; elsewhere, where a batch may be overtaken, any.
    ``device_ahead``: chunks that a device lane holds, at least, beside the one that it is at. ``items``: every sample
    is a batch by itself, in strict order; a place may hold several, and is delivered in as many runs as it comes in.
    ``more_batches``: by which the window may grow while it holds less than ``window_bytes`` (see ``window_length``).
    ``streams``: so many workers iterate the data set, each for itself, and a ticket is a batch that one of them has
    joined (0: workers are given keys).
    """

    window: int
    fixed: bool = True
    max_lateness: int = 0
    budget_bytes: int | None = None
    joins: bool = False
    inspect: bool = False
    cpu_runs: bool = True
    chunk_s: float = 2e-3
    chunk_samples: int = 1024
    lease_share: float = 1 / 8
    ahead_s: float = 2e-3
    queues: bool = True
    slow_factor: float = 2.0
    early: bool = True
    reserve: bool = True
    threshold: bool = True
    micro_batch: int = 16
    device_s: float = 10e-3
    compose_ahead: int = 1
    spares_device: bool = False
    rescue: bool = True
    devices: int = 1
    device_ahead: int = 1
    items: bool = False
    more_batches: int = 0
    window_bytes: int = 0
    streams: int = 0

    @property
    def pins(self) -> bool:
        """Whether it is known on which device a sample's batch will live, before the sample is prepared."""
        return self.devices > 1 and self.fixed and not self.max_lateness

    @property
    def device_lanes(self) -> tuple[str, ...]:
        """The names of the device lanes, in the order of their devices."""
        return (DEVICE,) if self.devices == 1 else tuple(f"{DEVICE}:{number}" for number in range(self.devices))

    @property
    def homes(self) -> tuple[str, ...]:
        """The sides on which tickets may wait for a device, for batches in turn: each device lane's own, or one."""
        return self.device_lanes if self.pins else (DEVICE,)
