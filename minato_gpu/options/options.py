"""Checks and resolves the loader's own arguments at construction."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import BatchSampler, IterableDataset

from minato_gpu.arguments import Arguments, LaneName
from minato_gpu.device import accelerator
from minato_gpu.faults.failures import RAISE, RETRY, check_on_error
from minato_gpu.lanes.contract import LaneSource
from minato_gpu.memory.limits import memory_limit
from minato_gpu.observe.metrics_server import MetricsAddress
from minato_gpu.options.cache import CacheOptions
from minato_gpu.options.host_cores import HostCores
from minato_gpu.pipeline.pipeline import Pipeline
from minato_gpu.samples import Value
from minato_gpu.sources import cluster_token
from minato_gpu.sources.peer_discovery import checked_peers
from minato_gpu.sources.source import source_of
from minato_gpu.util.messages import say_once
from minato_gpu.util.numbers import is_real, is_whole, nbytes

_DEFAULT_LATENESS = 8
LANES: tuple[LaneName, ...] = ("cpu", "device")
WORKER_KINDS = ("auto", "process", "thread")
ON_WORKER_DEATH = ("raise", "replace")
HOST = "host"
_RUN_ID = "TORCHELASTIC_RUN_ID"
_LONGEST_NAME = 64

_NEEDS_WORKERS = {
    "on_worker_death": "it replaces workers",
    "hang_timeout": "it watches workers",
    "max_workers": "it is the most workers that there may be",
    "share": "it is the process that reads ahead for workers",
    "cache": "copies are kept by the process that reads ahead",
    "cluster": "workers of this host join batches beside those of other machines",
}
"""Arguments that mean nothing without workers, and why."""
_NOT_FOR_STREAMS = {
    "pipeline": "apply its stages in __iter__",
    "on_error": "an iterator that raised has ended: handle errors inside __iter__",
    "on_worker_death": "a stream dies with its worker",
    "max_workers": "an IterableDataset is shared out to its workers",
    "share": "an iterable data set reads for itself, so there is nothing to share",
    "cache": "an iterable data set reads for itself, so there is nothing to keep",
    "cluster": "an IterableDataset is shared out to workers of this host",
}
"""Arguments that need a map-style data set, and why or what to do instead."""


@dataclass(frozen=True)
class Options:
    """The loader's own arguments, checked and resolved."""

    lateness: int  # batches that a sample may come after its place
    free: bool  # batches may be composed from what is ready
    threads: bool  # workers are threads
    lanes: tuple[str, ...]  # to open, "cpu" first
    devices: tuple[torch.device, ...]  # that batches go to, in turn
    skips: bool  # samples may be left out
    most_workers: int  # most workers at a time; 0: ``num_workers``
    host: HostCores | None  # the cores that all ranks of this host share; None: no max_workers="host"
    cache: CacheOptions
    share: str = ""  # the name of the reader process that loaders share; "": none
    share_bytes: int = 0  # budget of the shared reader process for prepared samples, in bytes; 0: none
    peers: tuple[str, ...] = ()  # the hosts whose caches are one, as ``checked_peers`` returns them; (): none
    trace: Path | None = None
    metrics: MetricsAddress | None = None
    more_lanes: tuple[LaneSource, ...] = ()  # beside the loader's own workers and devices

    @property
    def device(self) -> torch.device:
        """The first device; if there are several, all are CUDA devices."""
        return self.devices[0]

    @classmethod
    def check(cls, loader: Arguments) -> Options:
        """Resolves the arguments of a loader.

        Raises ValueError or TypeError that names the wrong one and says what to do, CacheDirectoryError or
        AgentError for a ``cache_dir`` or an agent that cannot be used.
        """
        if loader.pipeline is not None and not isinstance(loader.pipeline, Pipeline):
            raise TypeError(f"pipeline must be a minato_gpu.Pipeline or None, got {loader.pipeline!r}")
        if not isinstance(loader.generator, torch.Generator | None):
            raise TypeError(
                "generator must be a torch.Generator, such as torch.Generator().manual_seed(42), or None, got "
                f"{loader.generator!r}"
            )
        for name in ("host_memory_budget", "device_memory_budget", "epochs"):
            _at_least(name, getattr(loader, name), "leave it out for no limit")
        _check_kind(loader)
        _at_least("prefetch_factor", loader.prefetch_factor, "leave it out for 2 batches a worker")
        _at_least("snapshot_every_n_steps", loader.snapshot_every_n_steps, "every step can be saved anyway", least=0)
        _check_workers(loader)
        check_on_error(loader.on_error, loader.max_failures)
        devices = _devices(loader.device)
        host = HostCores.of_this_rank(loader.num_workers) if loader.max_workers == HOST else None
        most = loader.max_workers if host is None else host.most
        return cls(
            lateness=_lateness(loader),
            free=_free(loader),
            threads=_threads(loader),
            lanes=_lanes(loader, devices[0]),
            devices=devices,
            skips=loader.on_error not in (RAISE, RETRY),
            most_workers=int(most or 0),
            host=host,
            cache=CacheOptions.check(loader),
            share=_share(loader),
            peers=_peers(loader),
            share_bytes=_share_budget(loader),
            trace=_trace(loader.trace),
            metrics=MetricsAddress.check(loader.metrics_port),
            more_lanes=_cluster(loader),
        )


def memory_budget(name: str, value: Value) -> Value:
    """Returns the bytes of a budget that is a text such as "1GB"; anything else unchanged, and unchecked.

    Raises ValueError for a text that means no bytes.
    """
    return nbytes(name, value, "leave it out for no limit") if isinstance(value, str) else value


def _at_least(name: str, value: Value, advice: str, least: int = 1) -> None:
    """Raises TypeError or ValueError unless ``value`` is None or a whole number from ``least`` on.

    ``advice``: what the message says to do instead.
    """
    if value is None:
        return
    if not is_whole(value):
        raise TypeError(f"{name} must be a whole number or None, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}; {advice}")


def _check_kind(loader: Arguments) -> None:
    """Raises ValueError for a given argument that needs workers, or a map-style data set, if the loader lacks them."""
    given = [name for name in _NEEDS_WORKERS | _NOT_FOR_STREAMS if getattr(loader, name) not in (None, False, RAISE)]
    for name in given:
        if loader.num_workers == 0 and name in _NEEDS_WORKERS:
            raise ValueError(f"{name}: {_NEEDS_WORKERS[name]}; it needs num_workers > 0")
        if isinstance(loader.dataset, IterableDataset) and name in _NOT_FOR_STREAMS:
            raise ValueError(f"{name} needs a map-style data set: {_NOT_FOR_STREAMS[name]}")


def _check_workers(loader: Arguments) -> None:
    if loader.on_worker_death not in ON_WORKER_DEATH:
        raise ValueError(f"on_worker_death must be 'raise' or 'replace', got {loader.on_worker_death!r}")
    _check_max_workers(loader)
    limit = loader.hang_timeout
    if limit is None:
        return
    if not is_real(limit):
        raise TypeError(f"hang_timeout must be a number of seconds or None, got {limit!r}")
    if not 0 < limit < float("inf"):
        raise ValueError(f"hang_timeout must be a positive number of seconds, got {limit!r}; leave it out for no limit")


def _check_max_workers(loader: Arguments) -> None:
    most = loader.max_workers
    if most is None:
        return
    if most == HOST:
        if _threads(loader):
            raise ValueError("max_workers='host' shares cores among processes; it needs worker_kind='process'")
    else:
        _at_least("max_workers", most, "leave it out to have num_workers", least=max(1, loader.num_workers))


def _share(loader: Arguments) -> str:
    """Returns the name of the shared reader process; "" if the loader has its own."""
    name: object = loader.share
    if name is None or name is False:
        return ""
    if name is True:
        name = os.environ.get(_RUN_ID, "")
        if not name:
            raise ValueError(
                f"share=True shares among the processes of a job, which torchrun names by {_RUN_ID}; it is "
                "not set: pass a name"
            )
    if not isinstance(name, str):
        raise TypeError(f"share must be a name, True or None, got {name!r}")
    if not name or not name.isprintable() or "/" in name or len(os.fsencode(name)) > _LONGEST_NAME:
        raise ValueError(
            f"share must be a name without '/', of 1 to {_LONGEST_NAME} bytes, such as 'photographs'; got {name!r}"
        )
    if source_of(loader.dataset) is None and loader.share_budget is None:
        raise ValueError(
            "share: the data set does not say where its samples' bytes lie, so there is nothing to share; give it a "
            "method source(key) that returns a minato_gpu.Source, pass share_budget to share prepared samples, or "
            "leave share out"
        )
    if loader.cache_dir is not None:
        raise ValueError(
            "share: a directory is shared by all whose cache_dir it is: leave out share and cache_peers, or keep "
            "copies in memory alone by leaving out cache_dir, such as share=True, cache='100GB'"
        )
    return name


def _cluster(loader: Arguments) -> tuple[LaneSource, ...]:
    """Returns the one source of lanes on other machines; () without ``cluster``. Asks its agents over the network what
    they offer. Raises ValueError or TypeError that says what is wrong, and as ``Lanes.check``."""
    if loader.cluster is None:
        return ()
    from minato_gpu.lanes.far.cluster import Lanes

    if not isinstance(loader.cluster, Lanes):
        raise TypeError(f"cluster must be minato_gpu.Lanes, minato_gpu.RayLanes or None, got {loader.cluster!r}")
    if _threads(loader):
        raise ValueError("cluster: processes of this host join batches; it needs worker_kind='process'")
    if loader.lanes is not None and "cpu" not in loader.lanes:
        raise ValueError("cluster adds CPU workers, and lanes leaves them out: add 'cpu' to lanes")
    for name in ("cache", "cache_dir", "share", "share_budget"):
        if getattr(loader, name):
            raise ValueError(
                "cluster: sources are read where their samples are prepared, so nothing is kept here; leave out "
                f"{name}, or cluster"
            )
    loader.cluster.check(loader)
    return (loader.cluster,)


def _peers(loader: Arguments) -> tuple[str, ...]:
    """Returns the hosts whose caches are one, () for none. Raises ValueError or TypeError naming what is wrong."""
    if loader.cache_peers is None:
        return ()
    if not loader.share or not loader.cache:
        raise ValueError(
            "cache_peers joins the caches of hosts, each of which has one for all of its loaders: pass share and cache "
            "as well, such as share=True, cache='100GB', and no cache_dir: they are in memory"
        )
    cluster_token.token()
    return checked_peers(loader.cache_peers)


def _share_budget(loader: Arguments) -> int:
    """Returns the bytes of prepared samples that stay for other loaders; 0: none do."""
    if loader.share_budget is None:
        return 0
    if not loader.share:
        raise ValueError("share_budget is for samples that loaders share; pass share, their name, too")
    budget = nbytes("share_budget", loader.share_budget, "leave it out to share no prepared samples")
    limit, what = memory_limit()
    if budget > limit:
        raise ValueError(f"share_budget={budget} is more than the {limit} bytes of {what}; pass less")
    return budget


def _lateness(loader: Arguments) -> int:
    value = loader.max_lateness
    if value is None:
        return 0 if loader.in_order else _DEFAULT_LATENESS
    if not is_whole(value):
        raise TypeError(f"max_lateness must be a whole number of batches or None, got {value!r}")
    if value < 0:
        raise ValueError(f"max_lateness must not be negative, got {value}")
    if loader.in_order and value > 0:
        raise ValueError(
            f"max_lateness={value} contradicts in_order=True, which means 0; pass in_order=False for bounded lateness"
        )
    return int(value)


def _free(loader: Arguments) -> bool:
    """Returns whether batches may be composed from what is ready: out of order, of a map-style data set, and only where
    torch's own BatchSampler, or none, cuts the batches."""
    if loader.in_order or loader.max_lateness == 0 or isinstance(loader.dataset, IterableDataset):
        return False
    return loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler


def _threads(loader: Arguments) -> bool:
    kind, context = loader.worker_kind, loader.multiprocessing_context
    if kind not in WORKER_KINDS:
        raise ValueError(f"worker_kind must be one of {', '.join(map(repr, WORKER_KINDS))}, got {kind!r}")
    if kind == "thread" and context is not None:
        raise ValueError("worker_kind='thread' starts no processes; leave out multiprocessing_context")
    streams = isinstance(loader.dataset, IterableDataset) and loader.num_workers > 1
    if kind == "thread" and streams:
        raise ValueError(
            "worker_kind='thread' cannot share out an IterableDataset: get_worker_info() knows one worker to a "
            "process. Use worker_kind='process', or num_workers=1"
        )
    free_threaded = not getattr(sys, "_is_gil_enabled", lambda: True)()
    return bool(kind == "thread" or (kind == "auto" and free_threaded and context is None and not streams))


def _trace(value: Value) -> Path | None:
    """Returns the absolute path of the trace, None without one."""
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"trace must be a path, such as 'run.json', got {value!r}")
    path = Path(os.fsdecode(value)).absolute()
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"trace={str(path)!r} cannot be written; name a file in a directory that can be")
    return path


def _device(value: Value) -> torch.device:
    try:
        device = torch.device("cpu" if value is None else value)
    except (RuntimeError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"device={value!r} is no device that this PyTorch finds; use 'cpu' or 'cuda:0'") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={value!r}: batches live on 'cpu' or on 'cuda'; move them elsewhere in your loop")
    if device.type == "cuda" and not accelerator.available(device):
        raise ValueError(f"device={value!r}: this PyTorch sees no CUDA device; use device='cpu' or leave it out")
    return device


def _devices(value: Value) -> tuple[torch.device, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return (_device(value),)
    devices = tuple(_device(each) for each in value)
    if not devices:
        raise ValueError("device must name at least one device; leave it out for the CPU")
    if len(devices) > 1 and any(device.type != "cuda" for device in devices):
        raise ValueError(f"device={value!r}: several devices must all be CUDA devices")
    if len(devices) > 1:  # "cuda" may be another name for one of the others
        current = torch.cuda.current_device() if torch.cuda.is_available() else 0
        return tuple(torch.device("cuda", current) if str(each) == "cuda" else each for each in devices)
    return devices


def _lanes(loader: Arguments, device: torch.device) -> tuple[str, ...]:
    pipeline = loader.pipeline
    offers = pipeline is not None and pipeline.host_prefix < len(pipeline.stages)
    if loader.lanes is None:
        if offers and loader.device is None and loader.num_workers > 0:
            found = torch.cuda.is_available()
            why = "pass device='cuda' to use the GPU too" if found else "this PyTorch finds no CUDA device"
            say_once(f"the pipeline runs on the CPU alone: {why}", logging.WARNING if found else logging.INFO)
        return LANES if offers and device.type == "cuda" and loader.num_workers > 0 else LANES[:1]
    if isinstance(loader.lanes, str) or not isinstance(loader.lanes, Sequence):
        raise TypeError(f"lanes must be a sequence of {LANES}, got {loader.lanes!r}")
    unknown = [name for name in loader.lanes if name not in LANES]
    if unknown or not loader.lanes:
        raise ValueError(f"lanes must name at least one of {LANES}, got {tuple(loader.lanes)!r}")
    if "device" not in loader.lanes:
        return LANES[:1]
    if pipeline is None:
        raise ValueError("lanes: 'device' needs a pipeline with device stages; a plain data set runs on CPU workers")
    if not offers:
        raise ValueError(f"lanes: pipeline {pipeline.name!r} ends in a stage without a device implementation")
    if loader.num_workers == 0:
        raise ValueError(
            "lanes: 'device' needs num_workers > 0, the workers read its input; pass num_workers=1 or more"
        )
    return LANES if "cpu" in loader.lanes else LANES[1:]
