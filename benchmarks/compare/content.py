"""What the consumer does with a batch, and the check that every loader's batches hold the same samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.compare.workloads import INDEX
from benchmarks.peers import Job
from benchmarks.work import ContentError
from minato_gpu.stages import Tolerance


class Reader:
    """Reads every byte of every batch, and notes which samples came in which batch."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._indices: list[Any] = []
        self._late = 0
        self._in_epoch = 0

    def begin_epoch(self) -> None:
        """The next batch is an epoch's first."""
        self._in_epoch = 0

    def read(self, batch: Any) -> int:
        """Read it; the number of its samples."""
        for leaf in leaves(batch):
            _read(leaf)
        indices = np.asarray(batch[INDEX])
        self._indices.append(indices)
        self._late = max(self._late, self._in_epoch - int(indices.min()) // self._batch_size)
        self._in_epoch += 1
        return len(indices)

    @property
    def late(self) -> int:
        """How many batches after its place in the sampler's order the latest sample came."""
        return self._late

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
    indices = np.asarray(batch[INDEX]).tolist()
    expected = job.join([job.dataset[index] for index in indices])
    fields = job.pipeline.fields_at(len(job.pipeline.stages))
    for name, wanted in expected.items():
        level = fields[name].level if name in job.pipeline.outputs else 1.0
        found = list(leaves(batch[name]))
        for one, other in zip(leaves(wanted), found, strict=True):
            if one.shape != other.shape:
                raise ContentError(f"{name} of samples {indices[:5]}: shape {other.shape}, should be {one.shape}")
            limit = 0.0 if tolerance is None or one.dtype.kind != "f" else tolerance.maximum * level
            off = np.abs(one.astype(np.float64) - other.astype(np.float64)).max(initial=0.0)
            if off > limit:
                raise ContentError(f"{name} of samples {indices[:5]} is off by {off:g}, allowed {limit:g}")


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


def _read(array: Any) -> None:
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = len(flat) // 8 * 8
    np.bitwise_xor.reduce(flat[:whole].view(np.int64))
    np.bitwise_xor.reduce(flat[whole:])
