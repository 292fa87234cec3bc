"""The sizes and rules that a loader's arguments mean for its engine, worked out before anything is started."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch.utils.data import IterableDataset, default_collate

from minato_gpu.arguments import Arguments
from minato_gpu.device.work import IN_FLIGHT
from minato_gpu.options.options import Options
from minato_gpu.scheduling.policy import Policy

MICRO_BATCH = 16
MOST_ON_GPU = 128  # a micro-batch takes a GPU's JPEG engine as long as its largest photograph, whatever else is in it
MOST_ITEMS = 64  # delivered one by one, in a place: what a place costs the training process is then less than they do
HELD = 1 + IN_FLIGHT  # micro-batches of one device: those in flight, and the next, at hand
_MOST_PREFETCH = 16  # batches for each worker, where the window may grow
_WINDOW_BYTES = 64 << 20  # that the window may grow to hold
_LONG_S = 0.1  # a micro-batch of a GPU, or of a device that works alone: as many samples as keep all of it busy


@dataclass(frozen=True)
class Settings:
    """The settings of an engine."""

    batch: int = 1  # samples of a batch
    window: int = 1  # batches that are admitted and not delivered
    workers: int = 0  # worker processes or threads that are started; ``num_workers`` of them are at work at first
    items: int = 0  # samples, delivered one by one in order, that are admitted and handed over together; 0: batches
    streams: bool = False  # every worker iterates the data set itself, and the epoch ends when all streams do
    stacks: bool = False  # batches are what ``default_collate`` makes of samples that are asked for one by one
    whole: bool = False  # a worker that joins a batch prepares all of it
    cuts: tuple[int, ...] = ()  # stages before which samples may go on from one lane to another
    replaces: bool = False  # a worker that dies is replaced, where it can be
    replaceable: bool = False  # it can be, because it is a process
    timeout: float = 0.0  # seconds that the consumer waits for a batch; 0: no limit
    policy: Policy = field(default_factory=lambda: Policy(window=1))

    @classmethod
    def of(cls, loader: Arguments, options: Options) -> Settings:
        """Derives the settings from the loader's arguments."""
        streams, batched = isinstance(loader.dataset, IterableDataset), loader.batch_sampler is not None
        workers, pipeline = max(options.most_workers, loader.num_workers), loader.pipeline
        has_device, devices = "device" in options.lanes, len(options.devices)
        window = _prefetch(loader) * (workers + sum(lane.slots for lane in options.more_lanes))
        joined = (streams or not batched) and not options.lateness
        items = 0
        if joined and options.device.type == "cpu" and not has_device:
            # where bytes are counted, or samples may be left out, each is admitted by itself
            items = MOST_ITEMS if loader.host_memory_budget is None and not options.skips else 1
        found = cls(
            batch=loader.batch_size or 1,
            # of several devices each has at least as many batches as it has micro-batches
            window=window if devices == 1 else max(window, HELD * devices),
            workers=workers,
            items=items,
            streams=streams,
            stacks=batched and not streams and loader.collate_fn is default_collate,
            cuts=pipeline.cuts if pipeline is not None and len(options.lanes) > 1 else (),
            replaces=loader.on_worker_death == "replace",
            replaceable=loader.on_worker_death == "replace" and not options.threads,
            timeout=loader.timeout,
        )
        policy = found._policy(loader, options)
        return replace(found, policy=policy, whole=not (items or found.cuts) and (not batched or policy.fixed))

    def _micro_batch(self, loader: Arguments, options: Options) -> int:
        """Returns the most samples of one dispatch to a device.

        Dispatches go by predicted seconds; of several devices none may hold more than its share of the window.
        """
        most, devices = MICRO_BATCH, len(options.devices)
        if options.device.type != "cpu":
            most = min(MOST_ON_GPU, max(MICRO_BATCH, self.batch))
        if devices == 1 or (loader.batch_sampler is not None and loader.batch_size is None):
            return most
        return max(1, min(most, self.window * self.batch // (devices * HELD)))

    def _policy(self, loader: Arguments, options: Options) -> Policy:
        has_device, on_gpu = "device" in options.lanes, options.device.type != "cpu"
        rests = self.stacks or self.items > 0  # every sample stays where its worker has put it
        # the window may grow, and cheap batches may be admitted together
        elastic = not (self.streams or has_device or len(options.devices) > 1)
        longest = self.window if loader.prefetch_given else _MOST_PREFETCH * self.workers
        policy = Policy(
            window=_prefetch(loader) * self.workers if self.streams else self.window * self.batch,
            fixed=not options.free,
            max_lateness=options.lateness,
            budget_bytes=loader.host_memory_budget,
            joins=not (rests or options.free or has_device),  # of a device's no worker would have all
            shares=options.share_bytes > 0,
            inspect=has_device,
            queues=rests and not has_device,
            cpu_runs="cpu" in options.lanes,
            micro_batch=self._micro_batch(loader, options),
            compose_ahead=len(options.devices),
            spares_device=options.device.type == "cuda",
            devices=len(options.devices),
            items=self.items > 0,
            streams=self.workers if self.streams else 0,
            device_ahead=IN_FLIGHT if on_gpu else 1,
            window_batches=self.window,
            per_group=0 if options.lateness or self.items or not elastic else 2 * self.window // _prefetch(loader),
            more_batches=max(0, longest - self.window) if elastic else 0,
            window_bytes=_WINDOW_BYTES if loader.host_memory_budget is None else loader.host_memory_budget,
        )
        return replace(policy, device_s=_LONG_S) if on_gpu or not policy.cpu_runs else policy

    def batches_on_device(self, lanes: int) -> int:
        """Returns how many batches a device holds where no budget is given.

        These are the next one, one loaded behind it, and room for as many samples as its ``lanes`` prepare at once. The
        others wait on the host.
        """
        return lanes * (2 + -(-HELD * self.policy.micro_batch // self.batch))


def _prefetch(loader: Arguments) -> int:
    """Returns the batches that are admitted for each worker."""
    return max(1, loader.prefetch_factor or 0)
