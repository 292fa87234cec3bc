"""What is compared: each workload's samples, in the two forms in which loaders can have them; and the check.

``Prepared`` is a map-style data set whose items are finished samples: every loader takes that. ``Indexed`` holds the
pipeline's inputs, for loaders that can have its steps apart. Every sample carries its index, so that one sees whether
each came exactly once, and how late.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from benchmarks.data.__main__ import WORKLOADS
from benchmarks.data.published import Array
from benchmarks.peers import Job
from benchmarks.work import ContentError
from minato_gpu import Pipeline
from minato_gpu.pipeline.stages import Field, Tolerance
from minato_gpu.samples import sample_seed
from pipelines import object_detection, speech_recognition

INDEX = "index"
_BATCHES = 8  # of an epoch, at least: with fewer there is nothing to compare


class Begun:
    """How often each sample has been begun, in memory that forked workers share."""

    def __init__(self, samples: int) -> None:
        self.counts = np.frombuffer(mmap.mmap(-1, 4 * samples), np.int32)

    def work_s(self, epochs: int, costs_s: Array) -> float:
        """What was begun for later epochs than these costs, at ``costs_s`` for each sample. (Of those under way, the
        rest counts too.)"""
        return float((np.maximum(self.counts - epochs, 0) * costs_s).sum())


class Indexed:
    """A data set's items, each with its index."""

    def __init__(self, dataset: Any, begun: Begun | None = None) -> None:
        self.dataset = dataset
        self.begun = begun

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.begun is not None:
            self.begun.counts[index] += 1
        return {**self.dataset[index], INDEX: np.int64(index)}


class Prepared:
    """Finished samples, with the same random values in every epoch."""

    def __init__(self, source: Indexed, pipeline: Pipeline, seed: int) -> None:
        self.source = source
        self.pipeline = pipeline
        self.seed = seed

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self.pipeline.run(self.source[index], sample_seed(self.seed, 0, index, 0)))


class Padded:
    """A collate function of a workload that pads, with the indices added."""

    def __init__(self, pad: Callable[[list[Any]], dict[str, Any]]) -> None:
        self.pad = pad

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        indices = [int(sample[INDEX]) for sample in samples]
        batch = self.pad([{name: value for name, value in sample.items() if name != INDEX} for sample in samples])
        return {**batch, INDEX: torch.tensor(indices)}


SETTINGS: dict[str, tuple[int, Callable[[list[Any]], Any]]] = {
    "image_classification": (64, default_collate),
    "object_detection": (8, Padded(object_detection.pad_batch)),
    "segmentation_3d": (3, default_collate),
    "speech_recognition": (24, Padded(speech_recognition.pad_batch)),
}
"""The published batch size, which is smaller where the data are, and the collate function."""


def job(name: str, directory: Path, workers: int, begun: Begun | None = None, sample_bytes: int = 0) -> Job:
    """What loaders are asked to do: several epochs over the data in ``directory``."""
    workload, (batch_size, collate) = WORKLOADS[name], SETTINGS[name]
    pipeline = with_index(workload.pipeline(directory))
    source = Indexed(workload.dataset(directory), begun)
    return Job(
        Prepared(source, pipeline, first_epoch_seed()),
        min(batch_size, max(1, len(source) // _BATCHES)),
        workers,
        sample_bytes=sample_bytes,
        keep_workers=True,
        collate=collate,
        source=source,
        pipeline=pipeline,
    )


def first_epoch_seed() -> int:
    """The seed that a loader draws for its first epoch from a generator that was seeded with 0, as PyTorch's does."""
    generator = torch.Generator().manual_seed(0)
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def with_index(pipeline: Pipeline) -> Pipeline:
    return Pipeline(
        pipeline.stages,
        outputs=(*pipeline.outputs, INDEX),
        name=pipeline.name,
        inputs={**pipeline.input_fields, INDEX: Field(np.int64)},
        tolerance=pipeline.tolerance,
    )


# --- the consumer, and the check that every loader's batches hold the same samples ------------------------------------


class Reader:
    """Reads every byte of every batch, and notes which samples came in which batch."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._indices: list[Any] = []
        self._in_epoch = 0
        self.late = 0  # batches after its place in the sampler's order that the latest sample came

    def begin_epoch(self) -> None:
        """The next batch is an epoch's first."""
        self._in_epoch = 0

    def read(self, batch: Any) -> int:
        """Read it; the number of its samples."""
        read_bytes(batch)
        indices = np.asarray(batch[INDEX])
        self._indices.append(indices)
        self.late = max(self.late, self._in_epoch - int(indices.min()) // self._batch_size)
        self._in_epoch += 1
        return len(indices)

    def check(self, samples: int, epochs: int) -> None:
        """Raises ContentError unless every sample came once in each epoch."""
        counts = np.bincount(np.concatenate(self._indices), minlength=samples)
        wrong = np.flatnonzero(counts != epochs)
        if len(wrong):
            raise ContentError(f"samples that did not come once per epoch: {wrong[:5].tolist()} and so on")


def same_content(batch: Any, job: Job, tolerance: Tolerance | None) -> None:
    """Compare a batch with what one process prepares for the same indices.

    ``tolerance``: how far pictures may be off, in levels; None: not at all. Raises ContentError.
    """
    limit = 0.0 if tolerance is None else tolerance.maximum
    for name, off in deviations(batch, job):
        if off.max(initial=0.0) > limit:
            raise ContentError(f"{name} of samples is off by {off.max():g} levels, allowed {limit:g}")


def deviations(batch: Any, job: Job) -> Iterator[tuple[str, Array]]:
    """The name of each array of floats, and how far it is from what one process prepares for the same indices, in
    levels of its field. Raises ContentError where a shape differs, or anything but floats."""
    indices = np.asarray(batch[INDEX]).tolist()
    expected = job.join([job.dataset[index] for index in indices])
    fields = job.pipeline.fields_at(len(job.pipeline.stages))
    for name, wanted in expected.items():
        level = fields[name].level if name in job.pipeline.outputs else 1.0
        for one, other in zip(leaves(wanted), leaves(batch[name]), strict=True):
            if one.shape != other.shape or (one.dtype.kind != "f" and not np.array_equal(one, other)):
                raise ContentError(f"{name} of samples {indices[:5]} is {other.shape} of others than it should be")
            if one.dtype.kind == "f":
                yield name, np.abs(one.astype(np.float64) - other.astype(np.float64)) / level


def leaves(batch: Any) -> Iterator[Any]:
    """The arrays of a nested batch."""
    if isinstance(batch, dict):
        for item in batch.values():
            yield from leaves(item)
    elif isinstance(batch, (list, tuple)):
        for item in batch:
            yield from leaves(item)
    elif isinstance(batch, (torch.Tensor, np.ndarray, np.generic)):
        yield np.asarray(batch)


def read_bytes(batch: Any) -> None:
    """Read every byte of a batch."""
    for leaf in leaves(batch):
        flat = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
        whole = len(flat) // 8 * 8
        np.bitwise_xor.reduce(flat[:whole].view(np.int64))
        np.bitwise_xor.reduce(flat[whole:])
