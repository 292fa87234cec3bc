"""SPDL 0.8, by all means that its guide names: its loader with PyTorch's face, a process pool, threads, a region of
stages that runs in processes (``.to()``), threads in a subprocess, plain subprocesses.

Its best, as tried here: the thread-backed output queue (``use_thread_output_queue``, less time per batch); a
continuous source where several epochs follow, so that the pipeline stays warm; costly samples go through one by one
and are stacked afterwards, cheap ones by the batch. For cheap samples nothing of SPDL's came near subprocesses that
run a plain iterator and hand their batches over by a shared-memory arena (``iterate_in_subprocess``): the pipeline's
event loop takes about a millisecond for each batch.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.isolate import at_end
from benchmarks.peers.base import Job, Loader, Order, fetched

_SINK = 3  # SPDL's default
_SEGMENTS = _SINK + 3  # of an arena: queued, in the making, and in the consumer's hands
_job: Any = None  # set before workers are forked: SPDL pickles a stage's function with every call


@dataclass(frozen=True)
class SpdlPool(Loader):
    """``PipelineBuilder`` with a process pool or threads. ``by_batch``: one call prepares a whole batch."""

    package = "spdl.pipeline"

    processes: bool
    in_order: bool = False
    by_batch: bool = False
    concurrency: int | None = None
    calls_per_worker: int = 1

    def settings(self, job: Job) -> dict[str, Any]:
        return {
            "executor": f"{job.workers} {'processes' if self.processes else 'threads'}",
            "concurrency": self._calls(job),
            "output_order": "input" if self.in_order else "completion",
            "unit": "batch" if self.by_batch else "sample",
            "sink": _SINK,
            "continuous": job.keep_workers,
            "use_thread_output_queue": True,
        }

    def make(self, job: Job) -> Iterable[Any]:
        from spdl.pipeline import PipelineBuilder

        _fork_with(job)
        executor = None
        if self.processes:
            executor = ProcessPoolExecutor(job.workers, mp_context=multiprocessing.get_context("fork"))
        builder: PipelineBuilder[Any, Any] = PipelineBuilder()
        builder.add_source(Order(job, self.by_batch), continuous=job.keep_workers)
        builder.pipe(
            _prepare_batch if self.by_batch else _prepare,
            executor=executor,
            concurrency=self._calls(job),
            output_order="input" if self.in_order else "completion",
        )
        if not self.by_batch:
            builder.aggregate(job.batch_size).pipe(_join)
        builder.add_sink(_SINK)
        threads = 1 if self.processes else job.workers
        if not self.by_batch:
            threads += 1  # joins samples
        return _Running(builder.build(num_threads=threads, use_thread_output_queue=True))

    def _calls(self, job: Job) -> int:
        return self.concurrency or self.calls_per_worker * job.workers


@dataclass(frozen=True)
class SpdlLoader(Loader):
    """``get_pytorch_dataloader``: PyTorch's face, worker processes that begin anew with each epoch."""

    package = "spdl.dataloader"

    in_order: bool = True
    prefetch_factor: int = 2

    def settings(self, job: Job) -> dict[str, Any]:
        chosen = {"num_workers": job.workers, "prefetch_factor": self.prefetch_factor, "in_order": self.in_order}
        return chosen | {"multiprocessing_context": "fork"}

    def make(self, job: Job) -> Iterable[Any]:
        from spdl.dataloader import get_pytorch_dataloader

        loader: Any = get_pytorch_dataloader(
            job.dataset, job.batch_size, collate_fn=job.collate, **job.shuffling, **self.settings(job)
        )
        at_end.append(loader._shmem.unlink)  # of the data set's pickle
        return loader  # type: ignore[no-any-return]


@dataclass(frozen=True)
class SpdlRegion(Loader):
    """Stages between ``.to(ProcessPoolExecutorConfig)`` and ``.to(MAIN_PROCESS)``, which keep no order.

    ``buffer``: indices (or batches of them) of a transfer into the workers.
    """

    package = "spdl.pipeline"
    in_order = False

    by_batch: bool = True
    buffer: int = 1

    def settings(self, job: Job) -> dict[str, Any]:
        unit = "batch" if self.by_batch else "sample"
        return {"max_workers": job.workers, "unit": unit, "buffer_size": self.buffer, "continuous": job.keep_workers}

    def make(self, job: Job) -> Iterable[Any]:
        from spdl.pipeline import PipelineBuilder
        from spdl.pipeline.defs import MAIN_PROCESS, ProcessPoolExecutorConfig

        _fork_with(job)
        pool = ProcessPoolExecutorConfig(max_workers=job.workers, mp_context="fork")
        builder: PipelineBuilder[Any, Any] = PipelineBuilder()
        builder.add_source(Order(job, self.by_batch), continuous=job.keep_workers).to(pool, buffer_size=self.buffer)
        if self.by_batch:
            builder.pipe(_prepare_batch)
        else:
            builder.pipe(_prepare).aggregate(job.batch_size).pipe(_join)
        builder.to(MAIN_PROCESS).add_sink(_SINK)
        return _Running(builder.build(num_threads=1, use_thread_output_queue=True))


@dataclass(frozen=True)
class SpdlSubprocess(Loader):
    """``run_pipeline_in_subprocess``: threads in one subprocess, batches handed over by a shared-memory arena."""

    package = "spdl.pipeline"
    in_order = False

    by_batch: bool = False

    def settings(self, job: Job) -> dict[str, Any]:
        return {
            "threads": job.workers,
            "unit": "batch" if self.by_batch else "sample",
            "sink": _SINK,
            "buffer_size": _SINK,
            "arena": f"SharedMemorySegmentPool, {_SEGMENTS} segments",
            "continuous": job.keep_workers,
        }

    def make(self, job: Job) -> Iterable[Any]:
        from spdl.pipeline import PipelineBuilder, run_pipeline_in_subprocess

        _fork_with(job)
        builder: PipelineBuilder[Any, Any] = PipelineBuilder()
        builder.add_source(Order(job, self.by_batch), continuous=job.keep_workers)
        if self.by_batch:
            builder.pipe(_prepare_batch, concurrency=job.workers)
        else:
            builder.pipe(_prepare, concurrency=job.workers).aggregate(job.batch_size).pipe(_join)
        return run_pipeline_in_subprocess(
            builder.add_sink(_SINK).get_config(),
            num_threads=job.workers + 1,
            use_thread_output_queue=True,
            mp_context="fork",
            buffer_size=_SINK,
            arena=_arena(job, _SEGMENTS),
        )


@dataclass(frozen=True)
class SpdlSharded(Loader):
    """``iterate_in_subprocess`` in each worker on its share of the batches, merged in order; arenas; no pipeline."""

    package = "spdl.pipeline"

    buffer: int = 4

    def settings(self, job: Job) -> dict[str, Any]:
        return {
            "subprocesses": job.workers,
            "buffer_size": self.buffer,
            "arena": f"SharedMemorySegmentPool, {2 * self.buffer} segments each",
            "unit": "batch",
        }

    def make(self, job: Job) -> Iterable[Any]:
        from spdl.pipeline import iterate_in_subprocess
        from spdl.source.utils import MergeIterator

        _fork_with(job)
        parts = [
            iterate_in_subprocess(
                partial(_Shard, Order(job, by_batch=True), worker, job.workers),
                buffer_size=self.buffer,
                mp_context="fork",
                arena=_arena(job, 2 * self.buffer),
            )
            for worker in range(job.workers)
        ]
        return MergeIterator(parts)


class _Running:
    """A started pipeline; each ``iter`` is one epoch of it."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        pipeline.start()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._pipeline.get_iterator())


class _Shard:
    """Every n-th batch, prepared by one subprocess in turn; each ``iter`` is the next epoch."""

    def __init__(self, order: Order, first: int, step: int) -> None:
        self._order = order
        self._mine = slice(first, None, step)

    def __iter__(self) -> Iterator[Any]:
        return (_prepare_batch(batch) for batch in list(self._order)[self._mine])


def _fork_with(job: Job) -> None:
    global _job
    _job = job


def _prepare(index: int) -> Any:
    return _job.dataset[index]


def _prepare_batch(indices: list[int]) -> Any:
    return _job.join(fetched(_job.dataset, indices))


def _join(samples: list[Any]) -> Any:
    return _job.join(samples)


def _arena(job: Job, segments: int) -> Any:
    from spdl.pipeline import SharedMemorySegmentPool

    arena = SharedMemorySegmentPool(segment_size=job.batch_bytes + 4096, count=segments)
    at_end.append(arena.unlink)
    return arena
