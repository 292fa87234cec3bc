"""The parts of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from minato_gpu.engine.deaths import Deaths
from minato_gpu.engine.host_share import HostShare
from minato_gpu.engine.read_ahead import ReadAhead
from minato_gpu.engine.settings import Settings
from minato_gpu.estimates.estimator import Estimator
from minato_gpu.faults.watchdog import Watchdog
from minato_gpu.lanes.contract import Lane
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.observe.facts import NO_SUBSCRIBERS, Facts
from minato_gpu.scheduling.worker_count import WorkerCount
from minato_gpu.window.assembly import Assembly


@dataclass(frozen=True)
class Parts:
    """The parts of an engine."""

    links: WorkerChannels
    lanes: Mapping[str, Lane]  # lanes by name, the CPU's first
    assembly: Assembly
    settings: Settings = field(default_factory=Settings)
    estimates: Estimator | None = None
    reads: ReadAhead | None = None  # reads samples' bytes ahead
    deaths: Deaths = field(default_factory=Deaths)
    facts: Facts = NO_SUBSCRIBERS
    worker_count: WorkerCount | None = None  # decides how many workers are at work, if that may change
    host_share: HostShare | None = None  # decides it where ranks share the host's cores
    watchdog: Watchdog | None = None  # notices workers and lanes that hang
    read_ahead: int = 0  # batches beyond the window whose bytes are read
