"""torchdata 0.11 nodes: ``ParallelMapper`` with processes and with threads, in order and by completion.

Its best, as tried here: no snapshots of its state (``snapshot_frequency`` beyond the epoch); a ``Prefetcher`` behind
the batching, without which the mapper's limit of twice the workers samples in flight idles them during every step;
costly samples one by one, cheap ones by the batch, as tensors from processes (they travel by shared memory) and as
arrays from threads. It starts its workers anew for every epoch, and has nothing to change that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.peers.base import Job, Loader, Order, fetched

_NO_SNAPSHOTS = 10**9


@dataclass(frozen=True)
class TorchdataNodes(Loader):
    """sampler -> ParallelMapper -> (Batcher -> stack) -> Prefetcher -> Loader."""

    package = "torchdata.nodes"

    processes: bool
    in_order: bool = False
    by_batch: bool = False
    prefetch: int = 4

    def settings(self, job: Job) -> dict[str, Any]:
        return {
            "num_workers": job.workers,
            "method": "process" if self.processes else "thread",
            "in_order": self.in_order,
            "unit": "batch" if self.by_batch else "sample",
            "prefetch_factor": self.prefetch,
            "snapshot_frequency": _NO_SNAPSHOTS,
            "multiprocessing_context": "fork",
        }

    def make(self, job: Job) -> Iterable[Any]:
        from torchdata import nodes

        source = nodes.SamplerWrapper(Order(job, self.by_batch))
        node = nodes.ParallelMapper(
            source,
            self._function(job),
            num_workers=job.workers,
            in_order=self.in_order,
            method="process" if self.processes else "thread",
            multiprocessing_context="fork",
            snapshot_frequency=_NO_SNAPSHOTS,
        )
        if not self.by_batch:
            node = nodes.Mapper(nodes.Batcher(node, job.batch_size, drop_last=False), job.join)
        if self.prefetch:
            node = nodes.Prefetcher(node, self.prefetch, snapshot_frequency=_NO_SNAPSHOTS)
        loader: Iterable[Any] = nodes.Loader(node)
        return loader

    def _function(self, job: Job) -> Callable[[Any], Any]:
        dataset = job.dataset
        made = (lambda indices: job.join(fetched(dataset, indices))) if self.by_batch else dataset.__getitem__
        return (lambda asked: _to_send(made(asked))) if self.processes else made


def _to_send(sample: Any) -> Any:
    """The sample with its arrays as tensors, which travel between processes by shared memory."""
    if isinstance(sample, dict):
        return {key: _to_send(value) for key, value in sample.items()}
    return torch.from_numpy(sample) if isinstance(sample, np.ndarray) and sample.flags.writeable else sample
