"""The arguments of a loader, read-only, for the rooms that need some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from minato_gpu.samples import Value

if TYPE_CHECKING:
    import os
    from multiprocessing.context import BaseContext

    import torch

    from minato_gpu.pipeline.pipeline import Pipeline

LaneName = Literal["cpu", "device"]
WorkerKind = Literal["auto", "process", "thread"]
OnDeath = Literal["raise", "replace"]


class Arguments:
    """The arguments of a ``DataLoader``, which are its attributes; its docstring explains them.

    PyTorch has checked its own.
    """

    dataset: Value
    batch_size: int | None
    sampler: Iterable[Value]
    batch_sampler: Iterable[Value] | None
    num_workers: int
    collate_fn: Callable[[Value], Value]
    drop_last: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: BaseContext | None
    generator: torch.Generator | None
    prefetch_factor: int | None
    prefetch_given: bool
    persistent_workers: bool
    in_order: bool
    pipeline: Pipeline | None
    device: str | torch.device | Sequence[str | torch.device] | None
    lanes: Sequence[LaneName] | None
    max_lateness: int | None
    host_memory_budget: int | None
    device_memory_budget: int | None
    worker_kind: WorkerKind
    epochs: int | None
    on_error: Value
    max_failures: float | None
    on_worker_death: OnDeath
    hang_timeout: float | None
    snapshot_every_n_steps: int | None
    max_workers: int | Literal["host"] | None
    cache: int | str | Mapping[str, int | str] | None
    cache_dir: str | os.PathLike[str] | None
    share: str | bool | None
    cache_peers: Sequence[str] | str | None
    share_budget: int | str | None
    trace: str | os.PathLike[str] | None
    metrics_port: int | str | None
    cluster: Value
