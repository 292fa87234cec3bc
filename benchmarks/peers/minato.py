"""This project's loader: strict order (the default) and bounded lateness."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.peers.base import Job, Loader
from minato_gpu import DataLoader

_MANY = 1000  # epochs: more than any benchmark has


@dataclass(frozen=True)
class Minato(Loader):
    """``minato_gpu.DataLoader`` with its defaults, but for the order and the persistent workers.

    ``lanes``: prepare by the job's pipeline on these lanes; without, by its data set.
    """

    package = "minato_gpu.loader"
    late = "bounded"

    in_order: bool = True
    lanes: tuple[str, ...] = ()
    prefetch_factor: int | None = None

    def settings(self, job: Job) -> dict[str, Any]:
        chosen: dict[str, Any] = {"num_workers": job.workers}
        if not self.in_order:
            chosen["in_order"] = False
        if job.keep_workers:
            chosen |= {"persistent_workers": True, "epochs": _MANY}  # the next one is prepared while one ends
        if self.lanes:
            chosen["lanes"] = self.lanes
        if self.prefetch_factor:
            chosen["prefetch_factor"] = self.prefetch_factor
        return chosen

    def make(self, job: Job) -> Iterable[Any]:
        chosen = self.settings(job) | job.shuffling
        if self.lanes:
            chosen |= {"pipeline": job.pipeline, "generator": torch.Generator().manual_seed(0)}
        dataset = job.source if self.lanes else job.dataset
        return DataLoader(dataset, job.batch_size, collate_fn=job.collate, **chosen)
