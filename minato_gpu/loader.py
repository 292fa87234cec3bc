"""DataLoader: the PyTorch face. What lives longer than a call is its session's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from copy import copy
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, Sampler

from minato_gpu.arguments import LaneName, OnDeath, WorkerKind
from minato_gpu.delivery import EpochIterator
from minato_gpu.faults.failures import RAISE, OnError
from minato_gpu.inline import InlineIterator
from minato_gpu.iterator import EngineIterator
from minato_gpu.lanes.contract import LaneSource
from minato_gpu.memory import shm_limits
from minato_gpu.number_kinds import is_whole
from minato_gpu.observe.listening import watch
from minato_gpu.observe.metrics_server import export
from minato_gpu.observe.scalars import scalars
from minato_gpu.options import Options, memory_budget
from minato_gpu.pipeline import Pipeline
from minato_gpu.samples import JSON
from minato_gpu.sampling.samplers import Sampling
from minato_gpu.session import Session

T = TypeVar("T", covariant=True)

accelerating: ContextVar[bool] = ContextVar("accelerating", default=False)
"""Set while Accelerate prepares a loader by way of ``minato_gpu.accelerated``."""

_FIXED = {
    *("device", "lanes", "max_lateness", "host_memory_budget", "device_memory_budget", "worker_kind", "epochs"),
    *("on_error", "max_failures", "on_worker_death", "hang_timeout", "snapshot_every_n_steps", "max_workers", "cache"),
    *("cache_dir", "share", "trace", "metrics_port", "cluster"),
}
"""Arguments that are checked at construction and may not be set later. A pipeline may: its fields are kept anew."""


class DataLoader(TorchDataLoader[T]):
    """PyTorch's DataLoader, in which a slow sample holds up no batch that can do without it.

    All arguments of ``torch.utils.data.DataLoader`` mean what they mean there. The others are below.

    Args:
        pipeline: stages that prepare each sample; the data set then returns the first stage's fields (a mapping), and a
            batch is a dict of stacked tensors of the pipeline's outputs.
        device: where batches live (None: the CPU). Tensors are looked for in mappings and sequences of any class,
            however nested; those in other objects (a dataclass, say) stay on the CPU. Of several CUDA devices, given in
            a sequence, batch number k of the epoch lives on number k modulo theirs, so that each *round* of as many
            batches has one for every device; device stages of a sample run where its batch will live (out of order, on
            any). Without ``drop_last`` everything is delivered, and the last round may be short: the first devices then
            get a batch more than the others. With ``drop_last`` a last round that is not whole is dropped, as a last
            batch that is not full is: every device gets as many batches, and ``len()`` says so (of an iterable data
            set, whose end nobody knows, no round is dropped). An epoch that ``load_state_dict`` goes on with ends after
            the batches that had been delivered in part.
        lanes: which lanes prepare samples, of "cpu" and "device" (None: the device lane too where there is a pipeline
            that has device stages and ``device`` is a GPU).
        max_lateness: with ``in_order=False``, how many batches a sample may come after its place in the sampler's order
            (None: 8). ``in_order=True`` means 0.
        prefetch_factor: batches for each worker that are drawn from the sampler and not delivered: the window. Without
            it these are two, as in PyTorch, and up to sixteen while samples of very different cost leave workers idle
            and the window holds less than 64 MiB (or ``host_memory_budget``); ``stats()["window"]`` tells. Streams, and
            loaders with a device lane or several devices, keep two.
        host_memory_budget: bytes in flight on the host, a number, or a text such as "1GB" (None: the window, of at
            least three batches for each of several devices, is the only limit).
        device_memory_budget: the same on each device (None: three batches or so of it, more where they are small beside
            what is prepared there at once).
        worker_kind: "process", "thread", or "auto": threads on a free-threaded Python, else processes.
        epochs: the number of epochs that will be run, if known; workers then stay, and epochs overlap, until the last:
            the first samples of the next one are prepared while the last of this one are used. Leave it out where you
            change between epochs what samples are made of (a counter in shared memory, files): those would come too
            early for it.
        on_error: what becomes of a sample that raises: "raise" (its own error, when its batch is due); "retry": the
            same after a second try with the same draws; "skip": its batch comes without it; or a function that is given
            a ``BadSample`` when its batch is due and returns "skip" or "raise". A batch that loses all its samples is
            left out. In a distributed job (torch.distributed is initialised, or a DistributedSampler shares the data
            out), and with several devices, every rank yields the number of batches that its sampler's positions fix:
            such a batch comes as a batch of one, which repeats a sample of the last good batch (else of the next one),
            with the same draws, and is counted in ``stats()["samples_padded"]``, not among the delivered. Raises where
            the rank has no good sample.
        max_failures: how many samples of an epoch may be left out, a count (int) or a share of all (float); None: any.
            One more raises ``TooManyFailures``. Each rank counts its own; a resumed epoch counts on.
        on_worker_death: what becomes of a worker process that ends (kill -9, a segmentation fault, out of memory):
            "raise": PyTorch's RuntimeError; "replace": another starts, and other workers prepare the samples that it
            had, with the same draws. A sample (or batch) at which two workers have died is a bad one, and ``on_error``
            decides. The default is "raise", because PyTorch's arguments alone mean here what they mean there, and what
            restarts jobs may wait for that error; because most such workers were killed for want of memory, which a
            replacement needs as well; and because replacing takes a further process. An iterable data set's stream dies
            with its worker: always an error.
        hang_timeout: seconds after which a worker that is still at the same sample is taken to hang (None: never). It
            is reported with its Python stack, on the logger ``minato_gpu``, killed, and replaced as ``on_worker_death``
            says; where that is "raise", and for threads, which cannot be killed, ``WorkerHung`` is raised instead. The
            device lane is such a thread; a DALI graph may take so long for each sample of its micro-batch.
        snapshot_every_n_steps: batches between two states of a sampler that has ``state_dict`` and ``load_state_dict``;
            at least 16 while nobody saves, or where a state takes more than 16 KB. A resume draws again what came
            since, so that it goes on from any batch. Workers' streams are asked for their states as saves come.
        max_workers: so many workers are started, and between ``num_workers`` and these are at work, as many as pay:
            more while the consumer waits for samples to be prepared, fewer when some have nothing to do (None:
            ``num_workers``). A worker's ``get_worker_info().num_workers`` is this. Not for iterable data sets. "host":
            ranks that torchrun has started on this host share its cores. Each starts twice its share of workers; the
            rank with fewest batches ready has most of them at work, and those that are ahead rest. Give ``num_workers``
            a rank's share of the cores.
        cache: how many bytes of what the data set's ``source(key)`` names are kept for later epochs: a number, or a
            text such as "32GB" (10**9 bytes each) or "32GiB". In memory, or with ``cache_dir`` on disk; for both, a
            mapping such as ``{"memory": "8GB", "disk": "500GB"}``. Content is the same with and without.
        cache_dir: a directory on a local disk, which processes and runs may share. It is made where there is none.
        share: a name. Loaders of this user on this host that have the same one share one process that reads ahead: what
            several of them want at a time is read once, and ``cache`` is one budget in memory for all, the one that the
            first loader gives. Each delivers what it would alone. True: the name of torchrun's job. The first loader
            starts the process, which ends five seconds after the last one has left. If it is killed, workers read for
            themselves, and those that are started next have another one. Needs ``source(key)``; not with ``cache_dir``.
        trace: path; what becomes of every sample is written there in Perfetto's format, for ui.perfetto.dev to show:
            256 MiB at most, or as many bytes as ``{"path": ..., "bytes": "1GB"}`` says. Where another trace is being
            written there (another rank's, say), the path gets a number.
        metrics_port: serves Prometheus' metrics of this loader on that port of this machine alone, from construction on
            (0: any that is free; ``stats()["metrics"]`` tells which). With a host, as in "0.0.0.0:9090", others may
            ask, too. Loaders of a process may share a port; a copy of a loader, or a forked process, exports nothing.
            Raises ValueError where it is in use, ModuleNotFoundError without prometheus_client (the extra ``metrics``).
        cluster: workers of other machines, beside those of this one: ``minato_gpu.Lanes("host:port", ...)`` of agents
            that run there, or ``minato_gpu.RayLanes(cores=...)``. Batches are what they are without. Data set,
            pipeline and ``collate_fn`` go there once, by pickle; files are read where a sample is prepared. A machine
            that is silent for a second loses what it had to others. See the manual's "Several machines".

    Raises:
        ValueError, TypeError: arguments that contradict each other, as PyTorch does; or one is set later.
    """

    def __init__(
        self,
        dataset: Dataset[T],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        pipeline: Pipeline | None = None,
        device: str | torch.device | Sequence[str | torch.device] | None = None,
        lanes: Sequence[LaneName] | None = None,
        max_lateness: int | None = None,
        host_memory_budget: int | str | None = None,
        device_memory_budget: int | str | None = None,
        worker_kind: WorkerKind = "auto",
        epochs: int | None = None,
        on_error: OnError = RAISE,
        max_failures: float | None = None,
        on_worker_death: OnDeath = "raise",
        hang_timeout: float | None = None,
        snapshot_every_n_steps: int | None = 1,
        max_workers: int | Literal["host"] | None = None,
        cache: int | str | Mapping[str, int | str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        share: str | bool | None = None,
        trace: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        metrics_port: int | str | None = None,
        cluster: LaneSource | None = None,
    ) -> None:
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        self.prefetch_given = prefetch_factor is not None  # PyTorch's constructor has put its default in place of None
        self.pipeline = pipeline
        self.device = device
        self.lanes = lanes
        self.max_lateness = max_lateness
        self.host_memory_budget = memory_budget("host_memory_budget", host_memory_budget)
        self.device_memory_budget = memory_budget("device_memory_budget", device_memory_budget)
        self.worker_kind = worker_kind
        self.epochs = epochs
        self.on_error = on_error
        self.max_failures = max_failures
        self.on_worker_death = on_worker_death
        self.hang_timeout = hang_timeout
        self.snapshot_every_n_steps = snapshot_every_n_steps
        self.max_workers = max_workers
        self.cache = cache
        self.cache_dir = cache_dir
        self.share = share
        self.trace = trace
        self.metrics_port = metrics_port
        self.cluster = cluster
        options = Options.check(self)
        if num_workers > 0:
            shm_limits.check(self, processes=not options.threads)
        self._session = Session(self, options)
        if options.metrics is not None:
            export(self._session, options.metrics)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and "_session" in self.__dict__:
            raise ValueError(f"{name} attribute should not be set after {type(self).__name__} is initialized")
        super().__setattr__(name, value)

    # --- iterating -----------------------------------------------------------------------------------------

    def __iter__(self) -> Any:
        return self._get_iterator()

    def _get_iterator(self) -> Any:
        session = self._session
        session.begin_here()
        resumption = session.take_pending(self)
        number = session.number(resumption)
        session.observe(self)
        arguments = self._arguments()
        if self.num_workers == 0:
            iterator: Any = InlineIterator(arguments, session, number, resumption)
        else:
            self.check_worker_number_rationality()
            iterator = EngineIterator(arguments, session, number, resumption)
        session.begun(number, iterator.view)
        if self.num_workers > 0:
            watch(session)
        return iterator

    def _arguments(self) -> DataLoader[T]:
        """The loader as its iterators see it. They do not keep the loader itself: a subclass that keeps an iterator
        (as timm's and Ultralytics' do) would else be garbage that only a collection finds, with its workers."""
        found: DataLoader[T] = DataLoader.__new__(DataLoader)
        for name, value in self.__dict__.items():
            if name != "_session" and not isinstance(value, EpochIterator):
                found.__dict__[name] = value
        return found

    def __len__(self) -> int:
        """Batches of an epoch. Raises TypeError where sampler or data set do not tell."""
        count = super().__len__()
        return count if isinstance(self.dataset, IterableDataset) else count - count % Sampling(self).multiple

    # --- saving and resuming -------------------------------------------------------------------------------

    def state_dict(self, ahead: int = 0) -> dict[str, JSON]:
        """Where the epoch stands, to go on from there in another process: plain data, safe to load from any file.

        Delivered is what ``next`` has returned; with ``ahead=n`` the last n batches (at most 256) count as not
        delivered, for a consumer that reads n batches ahead of what it uses. May be called at any time, by any thread;
        after the end of an epoch it says that the next one is to begin. ``load_state_dict`` says which loaders can go
        on from it. Where later epochs may come from torch's global generator, it holds how that stands now, or stood
        before the batches of ``ahead`` were asked for. Python's and NumPy's are in no state.

        A sampler or an iterable data set with ``state_dict`` and ``load_state_dict`` adds its own state (maybe that of
        some batches ago, which are then drawn or read again and dropped). Otherwise torch's samplers and sequences are
        drawn again from the epoch's beginning; of any other sampler the remaining order is stored.

        Args:
            ahead: how many of the last batches count as not delivered.

        Raises:
            ValueError: the remaining order is endless or holds keys that are not plain, a stream without a state has
                raised or is too far on to be read again, or ``ahead`` goes too far back.
        """
        if not is_whole(ahead) or ahead < 0:
            raise ValueError(f"ahead must be a number of batches, 0 or more, got {ahead!r}")
        return self._session.state(self, int(ahead))

    def load_state_dict(self, state_dict: dict[str, JSON]) -> None:
        """Let the next ``iter()`` go on from where ``state_dict`` was called; an empty dict changes nothing.

        Every sample that had not been delivered is, exactly once and with the same content; in strict order batch by
        batch as if nothing had happened. Data set, sampler and batch size must be the same; workers, lanes and memory
        may differ, and ranks do with ``merge_state_dicts``. An iterable data set needs the same number of workers,
        unless it is a ``ShardedDataset`` or shares out its states itself (``SplitsStates``); without a state of its own
        its streams are read again and what was delivered is dropped, and the next ``iter()`` or batch raises ValueError
        where they would yield other samples. torch's global generator, where the state holds it, is set at that
        ``iter()``; if it has moved since this call it stays, which is said once.

        Args:
            state_dict: what ``state_dict`` or ``merge_state_dicts`` returned.

        Raises:
            ValueError, TypeError: the state is damaged or belongs to another loader; nothing has changed.
        """
        if state_dict != {}:
            self._session.load(self, state_dict)

    # --- made anew by others -------------------------------------------------------------------------------

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Accelerate asks for this before it puts a loader of torch's class in this one's place."""
        if not accelerating.get():
            raise TypeError(
                "accelerator.prepare() would put PyTorch's DataLoader, without pipeline and device, in this one's "
                "place; call loader = minato_gpu.accelerated.prepare(accelerator, loader) instead"
            )
        return False

    # --- looking -------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, JSON]:
        """Counters of the current or last epoch run, as plain data (times in seconds, sizes in bytes), for any thread.

        Raises RuntimeError before the first ``iter()``.
        """
        return self._session.stats()

    def scalars(self) -> dict[str, float]:
        """``stats()`` as flat scalars: every finite number under its path, such as "lanes/cpu/busy_share".

        For ``SummaryWriter.add_scalar`` of each, or ``wandb.log`` of all. What is None, no number, or told of single
        samples (``failures``) is left out. Raises RuntimeError before the first ``iter()``.
        """
        return scalars(self._session.stats())

    def timeline(self) -> dict[str, JSON]:
        """What each worker and lane did, and when batches were handed over; see ``Telemetry.timeline``.

        ``spans``: (start_s, end_s, lane, slot, epoch, first_position, count, slow); ``batches``: (handed_over_s,
        epoch, batch_number, size, wait_s). Seconds from ``iter()``. Raises RuntimeError before the first ``iter()``.
        """
        return self._session.timeline()

    def record_events(self, path: str | os.PathLike[str]) -> None:
        """Record every event and instruction of the scheduler from the next ``iter()`` on, for ``minato-gpu replay``.

        Where several sets of workers are started (one for each epoch, unless workers persist), the further files are
        named after the first: ``log.jsonl``, ``log-2.jsonl``, ...
        Takes about 50 microseconds an event.

        Args:
            path: of the log.

        Raises:
            ValueError: there is no scheduler of samples (no workers, an iterable data set), or workers are running.
        """
        if self.num_workers == 0 or isinstance(self.dataset, IterableDataset):
            raise ValueError("record_events needs num_workers > 0 and a map-style data set")
        self._session.record_events(Path(path))

    def __getstate__(self) -> dict[str, JSON]:
        """A copy has the arguments, and a session of its own."""
        return {**self.__dict__, "_session": copy(self._session)}
