"""The data sets: trivial samples, and samples that cost a fixed number of operations."""

from __future__ import annotations

import mmap
import time

import numpy as np
from numpy.typing import NDArray

from benchmarks.content import Int64
from benchmarks.work import work

TRIVIAL_WORDS = 1536  # 12 KiB


class Trivial:
    """Arrays of 12 KiB that cost about a microsecond: what is measured is the loader alone."""

    def __init__(self, samples: int, words: int = TRIVIAL_WORDS) -> None:
        self._samples = samples
        self._base = np.arange(words, dtype=np.int64)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Int64:
        return self._base + index


class WorkLog:
    """When each sample's work began and ended, in shared memory that forked workers write to.

    ``time.monotonic`` counts alike in every process of a machine. A sample's n-th preparation belongs to the n-th
    epoch, so what was prepared of an epoch before its clock started can be told afterwards. Workers must be forked.
    """

    def __init__(self, samples: int, epochs: int) -> None:
        shape = (epochs, samples)
        self._began = _shared(shape)
        self._ended = _shared(shape)
        self._calls = _shared((samples,))

    def begin(self, index: int) -> int:
        """Note the start of a preparation; the epoch that it belongs to."""
        epoch = int(self._calls[index])
        if epoch < len(self._began):
            self._began[epoch, index] = time.monotonic()
        self._calls[index] = epoch + 1
        return epoch

    def end(self, index: int, epoch: int) -> None:
        """Note the end of the preparation that ``begin`` announced."""
        if epoch < len(self._ended):
            self._ended[epoch, index] = time.monotonic()

    def done_before(self, moment: float, first_epoch: int) -> float:
        """Seconds of work done before ``moment`` for epochs from ``first_epoch`` on."""
        began, ended = self._began[first_epoch:], self._ended[first_epoch:]
        early = (began > 0) & (began < moment)
        until = np.where(ended[early] > 0, np.minimum(ended[early], moment), moment)
        return float((until - began[early]).sum())


class Costly:
    """Sample ``i`` costs ``operations[i]`` units of work and is an array of ``words`` 64-bit integers."""

    def __init__(self, operations: NDArray[np.int64], words: int, log: WorkLog | None = None) -> None:
        self.operations = operations
        self._base = np.arange(words, dtype=np.int64)
        self._log = log

    def __len__(self) -> int:
        return len(self.operations)

    def __getitem__(self, index: int) -> Int64:
        epoch = self._log.begin(index) if self._log is not None else 0
        row = self._base + index
        row[0] = index
        row[1] = work(int(self.operations[index]), index)
        if self._log is not None:
            self._log.end(index, epoch)
        return row


def _shared(shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Zeros that forked processes share; gone with the last of them."""
    return np.frombuffer(mmap.mmap(-1, 8 * int(np.prod(shape))), dtype=np.float64).reshape(shape)
