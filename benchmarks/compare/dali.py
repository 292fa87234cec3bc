"""DALI's own way: one pipeline with an external source, whose operators run in DALI's threads on the CPU.

The source reads files and draws the random values by the batch on DALI's Python thread, as a user's callback would; the
operators are those of the workload's device implementations, so that content can be compared. Workloads with a stage
that has no DALI implementation cannot run this way.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.peers.base import Job
from minato_gpu import Pipeline, Stage
from minato_gpu.pipeline import DaliFragment
from minato_gpu.samples import sample_seed


@dataclass(frozen=True)
class Dali:
    """``nvidia.dali.Pipeline`` with ``external_source``; ``prefetch``: its queue depth."""

    name: str
    prefetch: int = 2
    package: str = "nvidia.dali"
    order: str = "in order"
    warm: bool = True
    lanes: tuple[str, ...] = ("device",)

    @staticmethod
    def can_run(job: Job) -> bool:
        """Whether every stage after the host's is a DALI fragment."""
        rest = job.pipeline.stages[job.pipeline.host_prefix :]
        return bool(rest) and all(isinstance(stage.device, DaliFragment) for stage in rest)

    def settings(self, job: Job) -> dict[str, Any]:
        return {"num_threads": job.workers, "prefetch_queue_depth": self.prefetch, "exec_dynamic": True}

    def make(self, job: Job) -> Iterable[Any]:
        return _Epochs(job, self.settings(job))

    def peak_bytes_in_flight(self, loader: Any, job: Job) -> int:
        return (self.prefetch + 1) * job.batch_bytes

    def close(self, loader: Any) -> None:
        loader.graph = None


class _Epochs:
    """One graph for all epochs; the source goes on with the first batch after the last."""

    def __init__(self, job: Job, settings: dict[str, Any]) -> None:
        self._job = job
        self._batches = job.batches
        self._pipeline: Pipeline = job.pipeline
        self._stages = range(self._pipeline.host_prefix, len(self._pipeline.stages))
        self._host_outputs: list[list[dict[str, Any]]] = []
        self._next = 0
        first = self._read(0)
        self._names, self._drawn = self._inputs(first[0])
        self._host_outputs.clear()
        self.graph: Any = self._build(settings)

    def __iter__(self) -> Iterator[Any]:
        made = [name for name in self._job.pipeline.outputs if name in self._written]
        for _ in self._batches:
            found = self.graph.run()
            host = self._host_outputs.pop(0)
            columns = dict(zip(made, found, strict=True))
            samples = [
                {
                    name: np.array(columns[name][at]) if name in columns else fields[name]
                    for name in self._pipeline.outputs
                }
                for at, fields in enumerate(host)
            ]
            yield self._job.join(samples)

    @property
    def _written(self) -> set[str]:
        return {name for number in self._stages for name in self._pipeline.stages[number].writes}

    def _read(self, number: int) -> list[dict[str, Any]]:
        """The host's part of a batch: files, fields, and the values drawn for the rest."""
        batch = []
        for index in self._batches[number % len(self._batches)]:
            seed = sample_seed(self._job.dataset.seed, 0, index, 0)
            fields = dict(self._pipeline.run(self._job.source[index], seed, stop=self._stages.start))
            fields["drawn"] = {each: self._pipeline.draw(each, fields, seed) for each in self._stages}
            batch.append(fields)
        return batch

    def _inputs(self, fields: dict[str, Any]) -> tuple[list[str], list[tuple[int, str]]]:
        reads = {name for number in self._stages for name in self._pipeline.stages[number].reads}
        names = sorted(name for name in reads if name in fields)
        drawn = [(number, key) for number, params in fields["drawn"].items() for key in params]
        return names, drawn

    def _feed(self) -> list[list[Any]]:
        batch = self._read(self._next)
        self._next += 1
        self._host_outputs.append(batch)
        columns = [[np.asarray(fields[name]) for fields in batch] for name in self._names]
        columns += [[np.asarray(fields["drawn"][number][key]) for fields in batch] for number, key in self._drawn]
        return columns

    def _build(self, settings: dict[str, Any]) -> Any:
        dali = importlib.import_module("nvidia.dali")
        importlib.import_module("nvidia.dali.fn")
        graph = dali.Pipeline(batch_size=self._job.batch_size, device_id=None, **settings)
        with graph:
            fed = list(dali.fn.external_source(self._feed, num_outputs=len(self._names) + len(self._drawn)))
            known = dict(zip(self._names, fed, strict=False))
            params: dict[int, dict[str, Any]] = {number: {} for number in self._stages}
            for (number, key), node in zip(self._drawn, fed[len(self._names) :], strict=True):
                params[number][key] = node
            for number in self._stages:
                known.update(_fragment(self._pipeline.stages[number]).build(dali, known, params[number], "cpu"))
            graph.set_outputs(*(known[name] for name in self._pipeline.outputs if name in self._written))
        graph.build()
        return graph


def _fragment(stage: Stage) -> DaliFragment:
    assert isinstance(stage.device, DaliFragment)
    return stage.device
