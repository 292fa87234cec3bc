"""What the consumer does with a batch, and the check that everything arrived exactly once and unharmed.

A sample is one row of 64-bit integers: its index first, then a digest of the work that was done for it, then
numbers that depend on the index. The consumer adds up every row, so it reads every byte of every batch; sums and
indices are kept and compared after the clock has stopped, with what a single process got from the same data set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


class ContentError(AssertionError):
    """A loader lost, repeated or changed samples."""


class Consumer:
    """Reads batches of shape (samples, words) of int64, as tensors or arrays, and remembers what it read."""

    def __init__(self) -> None:
        self._indices: list[Int64] = []
        self._sums: list[Int64] = []

    def read(self, batch: Any) -> int:
        """Read every byte of the batch; the number of its samples."""
        rows = batch.numpy() if isinstance(batch, torch.Tensor) else np.asarray(batch)
        self._indices.append(rows[:, 0].copy())
        self._sums.append(rows.sum(axis=1))
        return len(rows)

    def check(self, expected: Int64, epochs: int = 1) -> None:
        """Compare with ``expected``: the row sum of each index, from a single process.

        Raises ContentError naming indices that came too seldom or too often, or whose bytes differ.
        """
        indices, sums = _joined(self._indices), _joined(self._sums)
        if len(indices) and not (indices.min() >= 0 and indices.max() < len(expected)):
            raise ContentError(f"indices outside the data set: {indices.min()} to {indices.max()}")
        counts = np.bincount(indices, minlength=len(expected))
        for problem, wrong in (("missing", counts < epochs), ("repeated", counts > epochs)):
            if wrong.any():
                raise ContentError(f"{problem} samples: {_some(np.flatnonzero(wrong))}")
        changed = indices[sums != expected[indices]]
        if len(changed):
            raise ContentError(f"changed samples: {_some(np.unique(changed))}")


def reference(dataset: Any) -> Int64:
    """The row sum of every sample, prepared here and now, in order."""
    return np.array([dataset[index].sum() for index in range(len(dataset))], dtype=np.int64)


def _joined(parts: Sequence[Int64]) -> Int64:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _some(indices: NDArray[Any], limit: int = 5) -> str:
    head = ", ".join(str(index) for index in indices[:limit])
    return head if len(indices) <= limit else f"{head} and {len(indices) - limit} more"
