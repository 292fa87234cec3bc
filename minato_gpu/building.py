"""From a loader's arguments to a running engine."""

from __future__ import annotations

import atexit
import functools
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset, default_collate
from torch.utils.data.dataloader import _get_distributed_settings, _sharding_worker_init_fn
from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe
from torch.utils.data.graph_settings import apply_sharding

from minato_gpu.batches.assembly import Assembly
from minato_gpu.batches.loading import Loading
from minato_gpu.engine import Engine
from minato_gpu.estimates.cuts import CutEstimator, part_names
from minato_gpu.estimates.estimator import Estimator
from minato_gpu.event_log import EventLog
from minato_gpu.faults.deaths import Deaths
from minato_gpu.faults.failures import pads_batches
from minato_gpu.faults.watchdog import Watchdog
from minato_gpu.lanes.contract import Lane
from minato_gpu.lanes.cpu import ProcessLane, ThreadLane
from minato_gpu.lanes.device_lane import IN_FLIGHT, DeviceLane
from minato_gpu.lanes.links import Links
from minato_gpu.lanes.produce import Job
from minato_gpu.memory.accelerator import enter_same, open_accelerator
from minato_gpu.memory.device_budget import DeviceBudget
from minato_gpu.memory.loans import Loans
from minato_gpu.memory.transfers import Host, Transfers
from minato_gpu.pump import Pump
from minato_gpu.report import usable_cores
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.costs import CostModel
from minato_gpu.scheduling.scheduler import Scheduler
from minato_gpu.scheduling.streams import StreamScheduler

_MICRO_BATCH = 16
_MOST_ON_GPU = 64  # of large batches: what is issued for a micro-batch of whatever size costs a GPU a millisecond
_HELD = 1 + IN_FLIGHT  # micro-batches of one device: those in flight, and the next, at hand
_BESIDE = 4  # threads beside a CPU lane: of a photograph that a GPU's own engine does not take, half is done on a core
_ALONE_S = 0.1  # a micro-batch of a device that works alone: as many samples as keep all its threads busy


def build_engine(loader: Any, base_seed: int) -> Engine:
    """Start workers and device executors for the loader; the engine is closed at the latest when Python ends."""
    options = loader._options
    iterable = isinstance(loader.dataset, IterableDataset)
    init = loader.worker_init_fn
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):  # these shard themselves over ranks and workers
        ranks = _get_distributed_settings()
        if options.threads:
            apply_sharding(loader.dataset, *ranks)
        else:
            init = functools.partial(_sharding_worker_init_fn, init, *ranks)
    replaceable = loader.on_worker_death == "replace" and not options.threads
    seeds = not options.threads
    job = Job.of(loader, base_seed, init, seeds_samples=seeds, cuts=_cuts(loader), repeats=replaceable)
    policy = _policy(loader)
    links = Links(loader.num_workers, addressed=iterable, arenas=not options.threads, window=policy.window)
    lanes: dict[str, Lane] = {}
    loading: Loading | None = None
    try:
        if not options.threads:
            lanes[m.CPU] = ProcessLane(links, job, loader.multiprocessing_context, replaceable=replaceable)
        if options.device.type == "cuda":  # after the fork of what makes the workers
            loading = _loading(loader, links)
        if options.threads:
            enter = enter_same() if loading is None else loading.transfers[0].accelerator.enter
            lanes[m.CPU] = ThreadLane(links, job, enter)
        if "device" in options.lanes:
            devices: list[DeviceLane] = []
            for number, name in enumerate(policy.device_lanes):
                transfers = None if loading is None else loading.transfers[number]
                devices.append(_device_lane(loader, links, transfers, name))
                lanes[name] = devices[-1]
            for each in devices:
                each.await_graphs()
        engine = _engine(loader, links, lanes, loading, policy)
    except BaseException:
        for lane in lanes.values():
            lane.close(0.0)
        if loading is not None:
            loading.close()
        links.close()
        raise
    # what was registered last runs first: before multiprocessing waits for its children and DALI shuts down
    atexit.register(engine.close)
    engine.pump.on_open = functools.partial(_register_again, engine)
    engine.on_close = lambda: atexit.unregister(engine.close)
    return engine


def _loading(loader: Any, links: Links) -> Loading:
    """The way to every device, each with a budget and a thread of its own, also where it is named more than once."""
    devices = loader._options.devices
    accelerators = {device: open_accelerator(device) for device in dict.fromkeys(devices)}
    host, budget = Host(links.engine_arena, accelerators[devices[0]]), loader.device_memory_budget
    batches = {device: _on_device(loader, devices.count(device)) if budget is None else 0 for device in accelerators}
    ways = {at: Transfers(each, host, DeviceBudget(budget, batches[at])) for at, each in accelerators.items()}
    return Loading([ways[device] for device in devices], host)


def _device_lane(loader: Any, links: Links, transfers: Transfers | None, name: str) -> DeviceLane:
    options = loader._options
    device = str(options.device) if transfers is None else transfers.accelerator.compute
    both = "cpu" in options.lanes
    alone = max(1, usable_cores() // len(options.devices))  # workers that only read leave the cores idle
    threads = alone if not both else 1 if device == "cpu" else min(_BESIDE, alone)
    return DeviceLane(links, loader.pipeline, device, _micro_batch(loader), threads, transfers, both, name)


def _register_again(engine: Engine) -> None:
    """DALI has been imported, and with it its own clean-up at exit: the engine must still be closed before."""
    atexit.unregister(engine.close)
    atexit.register(engine.close)


def _prefetch(loader: Any) -> int:
    """Batches admitted for each worker."""
    return max(1, loader.prefetch_factor or 0)


def _window(loader: Any) -> int:
    """Batches admitted and not delivered: with several devices, for each as many at least as it has micro-batches."""
    devices = len(loader._options.devices)
    window: int = _prefetch(loader) * loader.num_workers
    return window if devices == 1 else max(window, _HELD * devices)


def _micro_batch(loader: Any) -> int:
    """Most samples of one dispatch to a device, which go by what they are predicted to take; of several devices, none
    may hold more than its share of the window."""
    devices, batch = len(loader._options.devices), loader.batch_size or 1
    most = _MICRO_BATCH
    if loader._options.device.type != "cpu":
        most = min(_MOST_ON_GPU, max(_MICRO_BATCH, batch // 4))
    if devices == 1 or (loader._auto_collation and loader.batch_size is None):
        return most
    share: int = _window(loader) * batch // (devices * _HELD)
    return max(1, min(most, share))


def _on_device(loader: Any, lanes: int) -> int:
    """Batches that a device is to hold where no budget is given: the next one, one that is loaded behind it, and room
    for as many samples as its ``lanes`` prepare at once. The others wait on the host, whose window is larger."""
    return lanes * (2 + -(-_HELD * _micro_batch(loader) // (loader.batch_size or 1)))


def _stacks(loader: Any) -> bool:
    """Whether batches are what ``default_collate`` makes of samples that a worker is asked for one by one."""
    iterable = isinstance(loader.dataset, IterableDataset)
    return loader._auto_collation and not iterable and loader.collate_fn is default_collate


def _policy(loader: Any) -> m.Policy:
    options, has_device = loader._options, "device" in loader._options.lanes
    joins = not _stacks(loader) and not options.free and not has_device  # of a device's no worker would have all
    replays = loader._order is not None and loader._order.replays  # the log's batches, in the log's order
    policy = m.Policy(
        window=_window(loader) * (loader.batch_size or 1),
        fixed=replays or not options.free,
        max_lateness=0 if replays else options.lateness,
        budget_bytes=loader.host_memory_budget,
        whole_places=joins and loader.num_workers == 1,  # no other could help to join them
        joins=joins,
        inspect=has_device,
        queues=_stacks(loader) and not has_device,
        cpu_runs="cpu" in options.lanes,
        micro_batch=_micro_batch(loader),
        compose_ahead=len(options.devices),
        spares_device=options.device.type == "cuda",
        spreads=pads_batches(loader),
        devices=len(options.devices),
        device_ahead=1 if options.device.type == "cpu" else IN_FLIGHT,
    )
    return policy if policy.cpu_runs else replace(policy, device_s=_ALONE_S)


def _engine(loader: Any, links: Links, lanes: dict[str, Lane], loading: Loading | None, policy: m.Policy) -> Engine:
    options, iterable = loader._options, isinstance(loader.dataset, IterableDataset)
    batched, workers, place = loader._auto_collation, loader.num_workers, loader.batch_size or 1
    prefetch, stacks = _prefetch(loader), _stacks(loader)  # the scheduler must not hold the loader
    joins_whole = not batched or policy.fixed
    assembly = Assembly(links, Loans(), stacks=stacks, joins_whole=joins_whole, loading=loading, skips=options.skips)
    estimator = None if iterable else _estimator(loader, lanes)
    pump = Pump(
        links,
        lanes,
        assembly,
        lambda: StreamScheduler(policy, workers, prefetch) if iterable else Scheduler(policy),
        estimates=estimator,
        recorder=None if loader._events is None else EventLog(loader._next_log(), policy),
        stream_batch=place,
        cuts=bool(_cuts(loader)),
        deaths=Deaths(() if loader.pipeline is None else tuple(stage.name for stage in loader.pipeline.stages)),
    )
    return Engine(
        links,
        pump,
        window=_window(loader),
        place_size=1 if iterable else place,
        homes=policy.homes,
        streams=iterable,
        timeout=loader.timeout,
        order_log=loader._order,
        replaces=loader.on_worker_death == "replace",
        watchdog=None if loader.hang_timeout is None else Watchdog(lanes, loader.hang_timeout),
    )


def _cuts(loader: Any) -> tuple[int, ...]:
    """The stages before which a sample may go on from the CPU lane to the device lane."""
    return loader.pipeline.cuts if len(loader._options.lanes) > 1 else ()


def _estimator(loader: Any, lanes: dict[str, Lane]) -> Estimator:
    cuts = _cuts(loader)
    devices = [lane.name for lane in lanes.values() if lane.kind == m.DEVICE]
    kinds = (m.CPU, m.DEVICE) if devices else (m.CPU,)
    if not cuts:
        return Estimator(_costs(loader, kinds), kinds)
    return CutEstimator(_costs(loader, part_names(loader.pipeline)), kinds, loader.pipeline, devices)


def _costs(loader: Any, lanes: tuple[str, ...]) -> CostModel:
    features = 0 if loader.pipeline is None else len(loader.pipeline.feature_names)
    try:
        length: int | None = len(loader.dataset)
    except TypeError:
        length = None
    return CostModel(lanes, features, length)
