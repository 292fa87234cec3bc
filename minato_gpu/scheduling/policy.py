"""``Policy``: what the scheduler may and should do."""

from __future__ import annotations

from dataclasses import dataclass

from minato_gpu.scheduling.messages import DEVICE


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits and rules of the scheduler; fixed for one run. Times are predicted seconds."""

    window: int  # most tickets that are admitted and not delivered, while the window has not grown
    fixed: bool = True  # batches keep the sampler's composition; else they are composed of what is ready
    max_lateness: int = 0  # batches; 0: the sampler's order
    budget_bytes: int | None = None  # host bytes in flight; None: no limit
    joins: bool = False  # workers collate batches; one that prepares all samples of a batch need not store them
    shares: bool = False  # prepare samples before all bytes of their batch are there: other loaders want them, too
    inspect: bool = False  # read headers first where costs are unknown and a device lane is open
    cpu_runs: bool = True  # False: the CPU lane only inspects and collates, devices prepare every sample
    chunk_s: float = 2e-3  # least work of a dispatch of cheap samples
    group_s: float = 50e-3  # most work of batches that are admitted and dispatched together
    lease_share: float = 1 / 8  # share of the window's time that a slot is given at once
    ahead_s: float = 2e-3  # work that each slot holds ahead of need
    queues: bool = True  # a CPU slot may hold a whole lease ahead, unless leases are long (collating would wait)
    early: bool = True  # start samples that are predicted slow early
    reserve: bool = True  # out of order, slow samples never take every slot
    micro_batch: int = 16  # most samples of one device chunk
    device_s: float = 10e-3  # target of a device chunk
    compose_ahead: int = 1  # below so many composed, undelivered batches one may overtake an older sample
    spares_device: bool = False  # the device trains, too: price its work, and leave it alone while the CPU keeps up
    rescue: bool = True  # move the rest of a sample that turns out slow on the CPU to a device that ends it sooner
    devices: int = 1  # devices that get batches in turn, each with a lane ``device:n`` of its own
    device_ahead: int = 1  # chunks, at least, that a device lane holds beside the current one
    items: bool = False  # every sample is a batch by itself, in strict order
    window_batches: int = 1  # batches of the window
    per_group: int = 0  # batches of the window for each cheap batch that is admitted with others; 0: each by itself
    more_batches: int = 0  # batches by which the window may grow while it holds less than ``window_bytes``
    window_bytes: int = 0  # bytes of the window below which it may grow
    streams: int = 0  # workers that iterate the data set, each ticket being one's batch; 0: workers are given keys

    @property
    def pins(self) -> bool:
        """True when the device of a sample's batch is known before the sample is prepared."""
        return self.devices > 1 and self.fixed and not self.max_lateness

    @property
    def device_lanes(self) -> tuple[str, ...]:
        """Names of the device lanes, in the order of their devices."""
        return (DEVICE,) if self.devices == 1 else tuple(f"{DEVICE}:{number}" for number in range(self.devices))

    @property
    def homes(self) -> tuple[str, ...]:
        """Sides on which tickets may wait for a device: each device lane's own where batches are pinned to devices,
        else one."""
        return self.device_lanes if self.pins else (DEVICE,)
