"""This project's loader: strict order (the default) and bounded lateness."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.peers.base import Job

_MANY = 1000  # epochs: more than any benchmark has


def constructor() -> Any:
    """``minato_gpu.DataLoader``."""
    return importlib.import_module("minato_gpu").DataLoader


@dataclass(frozen=True)
class Minato:
    """``minato_gpu.DataLoader`` with its defaults, but for the order and the persistent workers.

    ``lanes``: prepare by the job's pipeline on these lanes; without, by its data set. ``options``: further arguments.
    """

    name: str
    in_order: bool = True
    lanes: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    package: str = "minato_gpu.loader"
    warm: bool = True

    @property
    def order(self) -> str:
        return "in order" if self.in_order else "bounded"

    def settings(self, job: Job) -> dict[str, Any]:
        chosen: dict[str, Any] = {"num_workers": job.workers}
        if not self.in_order:
            chosen["in_order"] = False
        if job.keep_workers:
            chosen |= {"persistent_workers": True, "epochs": _MANY}  # the next one is prepared while one ends
        if self.lanes:
            chosen["lanes"] = self.lanes
        if job.context != "fork":
            chosen["multiprocessing_context"] = job.context
        return chosen | dict(self.options)

    def make(self, job: Job) -> Iterable[Any]:
        chosen = self.settings(job) | job.shuffling
        if self.lanes:
            chosen |= {"pipeline": job.pipeline, "generator": torch.Generator().manual_seed(0)}
        loader: Iterable[Any] = constructor()(
            job.source if self.lanes else job.dataset, job.batch_size, collate_fn=job.collate, **chosen
        )
        return loader

    def close(self, loader: Any) -> None:
        """Nothing to do: its workers end when the connection to the measuring process closes."""
