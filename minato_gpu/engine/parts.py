"""What an engine is made of, and what it is to do, as the loader's arguments say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from minato_gpu.engine.deaths import Deaths
from minato_gpu.engine.host_share import HostShare
from minato_gpu.engine.read_ahead import ReadAhead
from minato_gpu.engine.settings import Settings
from minato_gpu.estimates.estimator import Estimator
from minato_gpu.faults.watchdog import Watchdog
from minato_gpu.lanes.contract import Lane
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.observe.event_log import EventLog
from minato_gpu.observe.facts import NO_SUBSCRIBERS, Facts
from minato_gpu.scheduling.scheduler import Scheduler
from minato_gpu.scheduling.worker_count import WorkerCount
from minato_gpu.window.assembly import Assembly


@dataclass(frozen=True)
class Parts:
    """``lanes`` by name, first the CPU's. ``recorder`` of the scheduler's events. ``reads``: samples' bytes are read
    ahead, of ``read_ahead`` batches beyond the window. ``worker_count``, or ``host_share`` where ranks share the host's
    cores: decides how many workers are at work, if their number may change. ``watchdog``: notices workers and lanes
    that hang.
    """

    links: WorkerChannels
    lanes: Mapping[str, Lane]
    assembly: Assembly
    make_scheduler: Callable[[], Scheduler]
    settings: Settings = field(default_factory=Settings)
    estimates: Estimator | None = None
    recorder: EventLog | None = None
    reads: ReadAhead | None = None
    deaths: Deaths = field(default_factory=Deaths)
    facts: Facts = NO_SUBSCRIBERS
    worker_count: WorkerCount | None = None
    host_share: HostShare | None = None
    watchdog: Watchdog | None = None
    read_ahead: int = 0
