"""DataLoader: the PyTorch face. What lives longer than a call is its session's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from copy import copy
from inspect import signature
from typing import Any, Literal, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, Sampler

from minato_gpu.arguments import Arguments, LaneName, OnDeath, WorkerKind
from minato_gpu.epoch.delivery import EpochIterator
from minato_gpu.epoch.inline import InlineIterator
from minato_gpu.epoch.iterator import EngineIterator
from minato_gpu.epoch.session import Session
from minato_gpu.faults.failures import RAISE, OnError
from minato_gpu.lanes.contract import LaneSource
from minato_gpu.memory.limits import check_budget
from minato_gpu.observe.counters import scalars
from minato_gpu.observe.metrics_server import export
from minato_gpu.observe.stats_socket import watch
from minato_gpu.options.options import Options, memory_budget
from minato_gpu.pipeline.pipeline import Pipeline
from minato_gpu.samples import JSON
from minato_gpu.sampling.samplers import Sampling
from minato_gpu.util.numbers import is_whole

T = TypeVar("T", covariant=True)

accelerating: ContextVar[bool] = ContextVar("accelerating", default=False)
"""Set while Accelerate prepares a loader by way of ``minato_gpu.accelerated``."""


class DataLoader(TorchDataLoader[T], Arguments):
    """PyTorch's DataLoader, in which a slow sample holds up no batch that can do without it.

    All arguments of ``torch.utils.data.DataLoader`` mean what they mean there. The others are below.

    Args:
        pipeline: How samples are prepared, stage by stage. The data set then returns the fields that the first stages
            read (a mapping), and a batch is a dict of stacked tensors, one for each output.
        device: The device that batches live on; None: the CPU. Tensors are found in mappings and sequences of any class
            and depth; tensors in other objects (a dataclass) stay on the CPU. With a sequence of CUDA devices, batch k
            of the epoch goes to device k modulo their number. Without ``drop_last`` the last round may be short; with
            it, a last round that does not have a batch for every device is dropped, and ``len()`` says so (not for an
            iterable data set, whose end is not known).
        lanes: The lanes that prepare samples, of "cpu" (workers) and "device". None: both where there are workers, the
            pipeline has device stages and ``device`` is a GPU, else the CPU lane alone.
        max_lateness: With ``in_order=False``: how many batches after its place in the sampler's order a sample may
            come; None: 8. ``in_order=True`` means 0.
        prefetch_factor: Batches for each worker that are drawn from the sampler and not delivered: the window. None: 2,
            as in PyTorch, and up to 16 while samples of very different cost leave workers idle, or batches in order
            are so cheap that several travel together, and the window holds less than 64 MiB (or
            ``host_memory_budget``). Streams, and loaders with a device lane or several devices, keep 2.
        host_memory_budget: Limit of the bytes of samples that are prepared or being prepared and not delivered: a
            number, or a text such as "1GB". None: the window is the only limit.
        device_memory_budget: Limit of the bytes of batches and samples that wait on each device; None: about three
            batches.
        worker_kind: "process", "thread", or "auto": threads on a free-threaded Python, else processes.
        epochs: How many epochs there will be, if known. Workers then stay until the last one, and the next epoch's
            first samples are prepared while the last batches of this one are used. Leave it out if you change between
            epochs what samples are made of (a counter in shared memory, files).
        on_error: What happens to a sample that raises. "raise": its error is raised when its batch is due. "retry": the
            same after a second try with the same draws. "skip": its batch comes without it. A function gets a
            ``BadSample`` and returns "skip" or "raise". A batch that loses all its samples is left out; in a
            distributed job, and with several devices, it comes as a batch of one repeated sample instead
            (``stats()["samples_padded"]``), so that every rank has as many batches as its sampler says.
        max_failures: How many samples of an epoch may be left out: a count (int) or a share (float); None: any number.
            One more raises ``TooManyFailures``. Each rank counts its own; a resumed epoch counts on.
        on_worker_death: What happens when a worker process ends (kill -9, a segmentation fault, out of memory).
            "raise": PyTorch's RuntimeError. "replace": another worker starts, and its samples are prepared again with
            the same draws; a sample or batch at which two workers have died counts as bad (``on_error``). With an
            iterable data set it is always an error.
        hang_timeout: Seconds at one sample after which a worker counts as hung; None: never. Its Python stack is logged
            and it is killed, and replaced as ``on_worker_death`` says. Otherwise, and for threads and the device lane,
            which cannot be killed, ``WorkerHung`` is raised. A DALI graph may take so long for each of its samples.
        snapshot_every_n_steps: Batches between two copies of the state of an iterable data set that has ``state_dict``
            and ``load_state_dict``: more where that is large. Every batch can be resumed from, whatever it is: what
            came since the copy is read again and dropped.
        max_workers: So many workers are started, and between ``num_workers`` and this number are at work, as many as
            pay; None: ``num_workers``. ``get_worker_info().num_workers`` is this number. Not for iterable data sets.
            "host": the ranks that torchrun has started on this host share its cores; give ``num_workers`` a rank's
            share of the cores.
        cache: Bytes of what the data set's ``source(key)`` names that are kept for later epochs: a number, or a text
            such as "32GB" (10**9 bytes each) or "32GiB". They are kept in memory, or with ``cache_dir`` on disk; for
            both, a mapping such as ``{"memory": "8GB", "disk": "500GB"}``. Content is the same with and without.
        cache_dir: A directory on a local disk, which processes and runs may share. It is made if it does not exist.
        share: A name. Loaders of this user on this host that have the same one share one process that reads ahead: what
            several of them want at a time is read once, and ``cache`` is one budget in memory for all, the first
            loader's. Each delivers what it would deliver alone. True: the name of torchrun's job. Not with
            ``cache_dir``.
        share_budget: Bytes of prepared samples (a number or a text, as for ``cache``) that this process keeps for the
            other loaders of the same ``share``; None: only what is read is shared. Loaders with the same data set,
            pipeline, ``worker_init_fn`` and seed then prepare each sample once, while they are near each other in their
            orders. Each delivers what it would deliver alone.
        cache_peers: The caches of several hosts are one: each source is kept by one host alone, and sent to the others
            when they want it. The address of each host's cache, such as ``["node1:7500", "node2:7500"]``, the same list
            on all hosts; "auto": torchrun's hosts find each other. Needs ``share``, ``cache``, and the same secret in
            the environment variable MINATO_GPU_TOKEN on all hosts; who knows it can read this user's files.
        trace: A path. What happens to every sample is written there as JSON, for Perfetto (ui.perfetto.dev), 256 MiB
            at most. If another trace is being written to that path (another rank's), a number is added to the name.
        metrics_port: A port on which Prometheus finds this loader's metrics, on this machine alone and from
            construction on; 0: any free port (``stats()["metrics"]`` says which). "0.0.0.0:9090" lets other machines
            ask. Loaders of a process may share a port; copies of a loader and forked processes export nothing. Raises
            ValueError if the port is in use, ModuleNotFoundError without prometheus_client (the extra ``metrics``).
        cluster: Workers of other machines, beside those of this one: ``minato_gpu.Lanes("host:port", ...)`` of agents
            that run there, or ``minato_gpu.RayLanes(cores=...)``. Batches are what they are without. Data set,
            pipeline and ``collate_fn`` go there once, by pickle; files are read where a sample is prepared. A machine
            that is silent for a second loses what it had to others. See "Several machines" in the manual.

    Raises:
        ValueError, TypeError: an argument is wrong or contradicts another one, or is set after construction.
        CacheDirectoryError, AgentError: ``cache_dir``, or an agent of ``cluster``, cannot be used.
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
        cache_peers: Sequence[str] | str | None = None,
        share_budget: int | str | None = None,
        trace: str | os.PathLike[str] | None = None,
        metrics_port: int | str | None = None,
        cluster: LaneSource | None = None,
    ) -> None:
        given = dict(locals())
        super().__init__(**{name: given[name] for name in _TORCHS if name in given})
        for name in _OWN:
            setattr(self, name, given[name])
        self.prefetch_given = prefetch_factor is not None  # PyTorch's constructor has put its default in place of None
        self.host_memory_budget = memory_budget("host_memory_budget", host_memory_budget)
        self.device_memory_budget = memory_budget("device_memory_budget", device_memory_budget)
        options = Options.check(self)
        if num_workers > 0:
            check_budget(self.host_memory_budget)
        self._session = Session(self, options)
        if options.metrics is not None:
            export(self._session, options.metrics)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and "_session" in self.__dict__:
            raise ValueError(f"{name} attribute should not be set after {type(self).__name__} is initialized")
        if name == "multiprocessing_context" and "_session" in self.__dict__ and not self._session.starts_processes:
            raise ValueError(
                "multiprocessing_context is of no use to this loader: its workers are threads, or have been started "
                "and stay from epoch to epoch; pass it to a new loader"
            )
        super().__setattr__(name, value)

    # --- iterating -----------------------------------------------------------------------------------------

    def __iter__(self) -> Any:
        return self._get_iterator()

    def _get_iterator(self) -> Any:
        session = self._session
        session.begin_here()
        resumption = session.restore_pending(self)
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
        """Returns a copy of the loader's attributes, for its iterators.

        They do not keep the loader itself: a subclass that keeps an iterator (as timm's and Ultralytics' do) would
        else be garbage that only a collection finds, with its workers.
        """
        found: DataLoader[T] = DataLoader.__new__(DataLoader)
        for name, value in self.__dict__.items():
            if name != "_session" and not isinstance(value, EpochIterator):
                found.__dict__[name] = value
        return found

    def __len__(self) -> int:
        """Returns the number of batches in an epoch. Raises TypeError where sampler or data set do not tell."""
        count = super().__len__()
        return count if isinstance(self.dataset, IterableDataset) else count - count % Sampling(self).multiple

    # --- saving and resuming -------------------------------------------------------------------------------

    def state_dict(self, ahead: int = 0) -> dict[str, JSON]:
        """Returns the position of the epoch as plain data, safe to load from any file: another process can go on
        from it.

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
        """Lets the next ``iter()`` go on from where ``state_dict`` was called; an empty dict changes nothing.

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
        """False while ``accelerated.prepare`` runs; else raises TypeError.

        Accelerate reads this before it puts a loader of torch's class in this one's place.
        """
        if not accelerating.get():
            raise TypeError(
                "accelerator.prepare() would put PyTorch's DataLoader, without pipeline and device, in this one's "
                "place; call loader = minato_gpu.accelerated.prepare(accelerator, loader) instead"
            )
        return False

    # --- looking -------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, JSON]:
        """Returns counts of the current or last epoch, as plain data: seconds, bytes and numbers. Any thread may
        ask. The manual's page statistics.md explains every key.

        Raises RuntimeError before the first ``iter()``.
        """
        return self._session.stats()

    def scalars(self) -> dict[str, float]:
        """Returns ``stats()`` as flat scalars: every finite number under its path, such as "lanes/cpu/busy_share".

        For ``SummaryWriter.add_scalar`` of each, or ``wandb.log`` of all. What is None, no number, or about single
        samples (``failures``) is left out. Raises RuntimeError before the first ``iter()``.
        """
        return scalars(self._session.stats())

    def timeline(self) -> dict[str, JSON]:
        """Returns what each worker and lane did, and when batches were handed over; see ``Telemetry.timeline``.

        ``spans``: (start_s, end_s, lane, slot, epoch, first_position, count, slow); ``batches``: (handed_over_s,
        epoch, batch_number, size, wait_s). Seconds from ``iter()``; ``slow``: over four times the median for a sample.
        Raises RuntimeError before the first ``iter()``.
        """
        return self._session.timeline()

    def __getstate__(self) -> dict[str, JSON]:
        """Returns the state of a copy, which has the arguments, and a session of its own."""
        return {**self.__dict__, "_session": copy(self._session)}


_TORCHS = signature(TorchDataLoader).parameters.keys()
_OWN = signature(DataLoader).parameters.keys() - _TORCHS
_FIXED = (_OWN | {"in_order"}) - {"pipeline"}
"""Arguments that are checked at construction and may not be set later. A pipeline may: its fields are kept anew."""
