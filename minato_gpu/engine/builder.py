"""Builds a running engine from a loader's arguments: its lanes, the way of batches to devices, and what predicts costs.

A lane of a new kind is opened in ``Builder.open_lanes``, as are those that an option brings (``Options.more_lanes``).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
from collections.abc import Iterator

from torch.utils.data._utils import MP_STATUS_CHECK_INTERVAL
from torch.utils.data.dataloader import _get_distributed_settings, _sharding_worker_init_fn
from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe
from torch.utils.data.graph_settings import apply_sharding

from minato_gpu.arguments import Arguments
from minato_gpu.device.accelerator import Accelerator, enter_same
from minato_gpu.device.budget import DeviceBudget
from minato_gpu.device.lane import DeviceLane
from minato_gpu.device.pinned_memory import PinnedArena
from minato_gpu.device.transfers import Transfers
from minato_gpu.engine.deaths import Deaths
from minato_gpu.engine.engine import Engine
from minato_gpu.engine.host_share import HostShare
from minato_gpu.engine.parts import Parts
from minato_gpu.engine.read_ahead import ReadAhead
from minato_gpu.engine.settings import Settings
from minato_gpu.estimates.cuts import CutEstimator, part_names
from minato_gpu.estimates.estimator import Estimator
from minato_gpu.faults.watchdog import Watchdog
from minato_gpu.lanes import forking
from minato_gpu.lanes.contract import Lane
from minato_gpu.lanes.process_lane import ProcessLane, start_method
from minato_gpu.lanes.produce import Job
from minato_gpu.lanes.thread_lane import ThreadLane
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.observe.facts import Facts
from minato_gpu.options.host_cores import HostCores
from minato_gpu.options.options import Options
from minato_gpu.pipeline.kept_fields import KeepableFields
from minato_gpu.samples import Key
from minato_gpu.sampling.lookahead import LookAhead
from minato_gpu.sampling.samplers import length_of
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.costs import CostModel
from minato_gpu.scheduling.micro_batch_cost import MicroBatchCost
from minato_gpu.scheduling.worker_count import WorkerCount
from minato_gpu.sources.fingerprint import fingerprint
from minato_gpu.sources.process import ReaderSettings
from minato_gpu.sources.reader import ReaderOwner
from minato_gpu.sources.shared_reader import open_reader
from minato_gpu.sources.source import Source, source_of
from minato_gpu.util.children import closed_at_exit
from minato_gpu.util.messages import say_once
from minato_gpu.util.threads import usable_cores
from minato_gpu.window.assembly import Assembly
from minato_gpu.window.loading import Loading

THREADS_BESIDE = 4  # beside a CPU lane: of a photograph that a GPU's own engine does not take, half is done on a core
READ_AHEAD = 1024  # samples beyond the window whose bytes may be read: two seconds' worth of 500 a second


def _no_source(key: Key) -> tuple[Source, ...]:
    """Returns no sources, in place of the ``source`` of a data set that has none."""
    return ()


class Builder:
    """Makes the parts of an engine."""

    def __init__(self, loader: Arguments, options: Options) -> None:
        self.loader = loader
        self.options = options
        self.settings = Settings.of(loader, options)

    def job(self, base_seed: int, epochs_before: int) -> Job:
        """Returns what workers need for their whole life. For the arguments see ``Job``."""
        loader, options, settings = self.loader, self.options, self.settings
        init = loader.worker_init_fn
        if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):  # these shard themselves over ranks and workers
            ranks = _get_distributed_settings()
            if options.threads:
                apply_sharding(loader.dataset, *ranks)
            else:
                init = functools.partial(_sharding_worker_init_fn, init, *ranks)
        return Job.of(
            loader,
            base_seed,
            init,
            workers=settings.workers,
            seeds_samples=not options.threads,
            skips=options.skips,
            cuts=settings.cuts,
            repeats=settings.replaceable,
            in_order=settings.policy.fixed,
            epochs_before=epochs_before if settings.streams else 0,
        )

    def open_lanes(
        self, job: Job, links: WorkerChannels, undo: contextlib.ExitStack
    ) -> tuple[dict[str, Lane], Loading | None]:
        """Opens all lanes; returns them by name, and the way of batches to GPUs (None if batches stay on the host).

        ``undo`` closes what is open. The order matters: worker processes are forked before CUDA is initialised, and
        threads begin after that.
        """
        options, loading, lanes = self.options, None, dict[str, Lane]()

        def add(lane: Lane) -> None:
            undo.callback(lane.close, MP_STATUS_CHECK_INTERVAL)
            assert lane.name not in lanes, f"two lanes are called {lane.name}"
            lanes[lane.name] = lane

        if not options.threads:
            context, replaceable = self.loader.multiprocessing_context, self.settings.replaceable
            add(ProcessLane(links, job, context, replaceable=replaceable))
        if options.device.type == "cuda":
            loading = self._loading(links)
            undo.callback(loading.close)
        if options.threads:
            add(ThreadLane(links, job, enter_same() if loading is None else loading.transfers[0].accelerator.enter))
        devices = list[DeviceLane]()
        for number, name in enumerate(self.settings.policy.device_lanes if "device" in options.lanes else ()):
            devices.append(self._device_lane(links, None if loading is None else loading.transfers[number], name))
            add(devices[-1])
        for device in devices:
            device.await_graphs()
        for source in options.more_lanes:
            for lane in source.open(job, links):
                add(lane)
        return lanes, loading

    def _device_lane(self, links: WorkerChannels, transfers: Transfers | None, name: str) -> DeviceLane:
        """Returns the lane of one device, whose batches go there by ``transfers``."""
        device = str(self.options.device) if transfers is None else transfers.accelerator.compute
        both = "cpu" in self.options.lanes
        alone = max(1, usable_cores() // len(self.options.devices))  # workers that only read leave the cores idle
        threads = alone if not both else 1 if device == "cpu" else min(THREADS_BESIDE, alone)
        micro_batch = self.settings.policy.micro_batch
        assert self.loader.pipeline is not None  # or there would be no such lane
        return DeviceLane(links, self.loader.pipeline, device, micro_batch, threads, transfers, both, name)

    def read_ahead(self, readers: ReaderOwner) -> ReadAhead | None:
        """Borrows the reader process. Returns None if the data set declares no sources and shares no prepared samples.

        None also with workers of other machines: each sample is read where it is prepared, which is not known yet.
        """
        if self.loader.cluster is not None:
            return None
        loader, cache, share = self.loader, self.options.cache, self.options.share
        fingerprint = self._fingerprint() if self.options.share_bytes else ""
        declared = None if self.settings.streams else source_of(loader.dataset)
        sources = _no_source if declared is None and fingerprint else declared
        if sources is None:
            return None
        # a device lane makes fields of its own, and other loaders may have another pipeline: then raw bytes are kept
        pipeline = loader.pipeline if self.options.lanes == ("cpu",) and not share else None
        settings = ReaderSettings(
            memory_bytes=cache.memory_bytes,
            disk_bytes=cache.disk_bytes,
            directory=cache.directory,
            samples=length_of(loader.dataset) or 0,
            workers=loader.num_workers,
            peers=self.options.peers,
            keeps_fields=cache.memory_bytes > 0 and pipeline is not None and bool(KeepableFields(pipeline)),
            share_bytes=self.options.share_bytes if fingerprint else 0,
            fingerprint=fingerprint,
        )
        context, _ = start_method(loader.multiprocessing_context)
        start = functools.partial(forking.start_reader, context)
        reader = readers.borrow(loader.pipeline, settings, functools.partial(open_reader, start, share))
        # on disk nothing follows orders in which keys come twice, and nothing at all where several loaders have theirs
        follows = cache and not share
        look_ahead = LookAhead(loader, uses_repeats=reader.settings.memory_bytes > 0) if follows else None
        return ReadAhead(reader, sources, look_ahead)

    def _fingerprint(self) -> str:
        """Returns a fingerprint of what prepares samples: loaders with the same one may share prepared samples.

        "" where this loader cannot share them, which is logged once.
        """
        loader, why = self.loader, ""
        if self.options.threads:
            why = "threads draw from generators that they have in common"
        elif self.options.lanes != ("cpu",):
            why = "a device lane prepares them, too"
        else:
            try:
                return fingerprint(loader.dataset, loader.pipeline, loader.worker_init_fn)
            except Exception as error:
                why = (
                    f"whether others would prepare the same is not known, as what prepares them has no pickle: {error}"
                )
        say_once(f"share={self.options.share!r}: this loader shares no prepared samples: {why}")
        return ""

    def _loading(self, links: WorkerChannels) -> Loading:
        """Returns the way of batches to devices.

        Each device has a budget and a thread of its own, even if it is named twice.
        """
        devices = self.options.devices
        accelerators = {device: Accelerator(device) for device in dict.fromkeys(devices)}
        host = PinnedArena(links.engine_arena, links.loans, accelerators[devices[0]])
        budget = self.loader.device_memory_budget
        batches = {
            device: self.settings.batches_on_device(devices.count(device)) if budget is None else 0
            for device in accelerators
        }
        ways = {at: Transfers(each, host, DeviceBudget(budget, batches[at])) for at, each in accelerators.items()}
        return Loading([ways[device] for device in devices], host)

    def estimator(self, lanes: dict[str, Lane]) -> Estimator | None:
        """Returns the predictor of costs.

        None for an iterable data set, of whose samples nothing is known before, and for a device lane alone: there is
        nothing to choose, and predictions took a third of the training process's time for each sample.
        """
        if self.settings.streams or "cpu" not in self.options.lanes:
            return None
        devices = [lane.name for lane in lanes.values() if lane.kind == m.DEVICE]
        kinds = (m.CPU, m.DEVICE) if devices else (m.CPU,)
        pipeline = self.loader.pipeline
        micro_batches = MicroBatchCost(self.settings.policy.micro_batch) if self.options.device.type != "cpu" else None
        if pipeline is None or not self.settings.cuts:
            return Estimator(self._costs(kinds), kinds, micro_batches)
        return CutEstimator(self._costs(part_names(pipeline)), kinds, pipeline, devices, micro_batches)

    def _costs(self, lanes: tuple[str, ...]) -> CostModel:
        features = 0 if self.loader.pipeline is None else len(self.loader.pipeline.feature_names)
        return CostModel(lanes, features, length_of(self.loader.dataset))


def build_engine(
    loader: Arguments,
    options: Options,
    base_seed: int,
    facts: Facts,
    readers: ReaderOwner,
    epochs_before: int,
) -> Engine:
    """Returns an engine whose workers and device executors have been started. It is closed when Python ends, if not
    before.

    ``readers`` owns the loader's reader process. ``epochs_before``: see ``Job``.
    """
    builder = Builder(loader, options)
    settings, workers = builder.settings, loader.num_workers
    with _explain_descriptors(loader, options), contextlib.ExitStack() as undo:
        reads = builder.read_ahead(readers)
        if reads is not None:
            undo.callback(reads.reader.give_back)
        links = WorkerChannels(
            settings.workers,
            addressed=settings.streams,
            arenas=not options.threads,
            fetched=None if reads is None else reads.reader.arena,
            active=workers,
            fields=None if reads is None else reads.reader.fields,
            prepared=None if reads is None else reads.reader.prepared,
        )
        undo.callback(links.close)
        lanes, loading = builder.open_lanes(builder.job(base_seed, epochs_before), links, undo)
        share = _host_share(options.host, workers)
        assembly = Assembly(
            links,
            stacks=settings.stacks,
            joins_whole=settings.whole,
            items=settings.items > 0,
            loading=loading,
            skips=options.skips,
        )
        parts = Parts(
            links,
            lanes,
            assembly,
            settings,
            estimates=builder.estimator(lanes),
            reads=reads,
            deaths=Deaths(() if loader.pipeline is None else tuple(stage.name for stage in loader.pipeline.stages)),
            facts=facts,
            worker_count=WorkerCount(workers, settings.workers) if settings.workers > workers and not share else None,
            host_share=share,
            watchdog=None if loader.hang_timeout is None else Watchdog(lanes, loader.hang_timeout),
            read_ahead=0 if reads is None else -(-READ_AHEAD // settings.batch),
        )
        engine = Engine(parts)
        undo.pop_all()
    # a lane that has opened may have imported DALI, which cleans up as Python ends
    engine.pump.on_open = functools.partial(_close_at_exit, engine)
    engine.on_close = closed_at_exit(engine.close)
    return engine


@contextlib.contextmanager
def _explain_descriptors(loader: Arguments, options: Options) -> Iterator[None]:
    """Adds to an error of exhausted file descriptors what to do."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        told = f"{error.strerror}: raise the limit (`ulimit -n`, or resource.setrlimit)"
        if not options.threads:
            told += f". Each of the num_workers={loader.num_workers} worker processes takes two or three"
        raise OSError(error.errno, told) from error


def _host_share(host: HostCores | None, workers: int) -> HostShare | None:
    if host is None or host.ranks == 1:
        return None
    try:
        return HostShare(host, workers)
    except OSError as error:
        say_once(f"this rank shares no cores with others, as it has no page in common with them: {error}")
        return None


def _close_at_exit(engine: Engine) -> None:
    """Has the engine closed before DALI shuts down: what was registered last runs first."""
    atexit.unregister(engine.close)
    atexit.register(engine.close)
