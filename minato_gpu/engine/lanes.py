"""The lanes of a loader, in the one list that names them: a new kind of lane is a function more in ``LANES``.

The order matters. Worker processes are forked before CUDA is initialised, and threads begin after that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from minato_gpu.arguments import Arguments
from minato_gpu.device.accelerator import enter_same
from minato_gpu.device.lane import DeviceLane
from minato_gpu.device.transfers import Transfers
from minato_gpu.lanes.contract import Lane
from minato_gpu.lanes.process_lane import ProcessLane
from minato_gpu.lanes.produce import Job
from minato_gpu.lanes.thread_lane import ThreadLane
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.options.options import Options
from minato_gpu.window.loading import Loading


@dataclass
class Site:
    """The loader, memory and devices that lanes are opened with."""

    loader: Arguments
    options: Options
    job: Job
    links: WorkerChannels
    replaceable: bool  # worker processes that end are replaced
    device_lanes: tuple[str, ...]  # their names
    make_loading: Callable[[WorkerChannels], Loading]
    make_device_lane: Callable[[WorkerChannels, Transfers | None, str], DeviceLane]
    loading: Loading | None = None  # the way of batches to devices, once it is open

    def open_lanes(self, undo: contextlib.ExitStack) -> dict[str, Lane]:
        """Opens all lanes, by name; ``undo`` closes what is open."""
        lanes: dict[str, Lane] = {}
        for opened in LANES:
            for lane in opened(self, undo):
                undo.callback(lane.close, 0.0)
                assert lane.name not in lanes, f"two lanes are called {lane.name}"
                lanes[lane.name] = lane
        return lanes


def _processes(site: Site, _: contextlib.ExitStack) -> Iterator[Lane]:
    if not site.options.threads:
        yield ProcessLane(site.links, site.job, site.loader.multiprocessing_context, replaceable=site.replaceable)


def _loading(site: Site, undo: contextlib.ExitStack) -> Iterator[Lane]:
    """Opens no lane, but what the lanes after it need of a GPU."""
    if site.options.device.type == "cuda":
        site.loading = site.make_loading(site.links)
        undo.callback(site.loading.close)
    yield from ()


def _threads(site: Site, _: contextlib.ExitStack) -> Iterator[Lane]:
    if site.options.threads:
        enter = enter_same() if site.loading is None else site.loading.transfers[0].accelerator.enter
        yield ThreadLane(site.links, site.job, enter)


def _devices(site: Site, _: contextlib.ExitStack) -> Iterator[Lane]:
    devices = list[DeviceLane]()
    for number, name in enumerate(site.device_lanes if "device" in site.options.lanes else ()):
        transfers = None if site.loading is None else site.loading.transfers[number]
        devices.append(site.make_device_lane(site.links, transfers, name))
        yield devices[-1]
    for each in devices:
        each.await_graphs()


def _others(site: Site, _: contextlib.ExitStack) -> Iterator[Lane]:
    for source in site.options.more_lanes:
        yield from source.open(site.job, site.links)


LANES: tuple[Callable[[Site, contextlib.ExitStack], Iterator[Lane]], ...] = (
    _processes,
    _loading,
    _threads,
    _devices,
    _others,
)
"""The functions that open the lanes of each kind."""
