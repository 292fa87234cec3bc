"""The data sets: trivial samples, and samples that cost a fixed number of operations."""

from __future__ import annotations

import mmap
import os
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
    epoch, so what was prepared of an epoch before its clock started can be told afterwards. Workers that are not forked
    get it by pickle, while this process lives.
    """

    def __init__(self, samples: int, epochs: int) -> None:
        self._memory = os.memfd_create("work log")
        os.ftruncate(self._memory, 8 * samples * (2 * epochs + 1))
        self._map(self._memory, samples, epochs)

    def _map(self, memory: int, samples: int, epochs: int) -> None:
        rows = np.frombuffer(mmap.mmap(memory, 0), dtype=np.float64).reshape(2 * epochs + 1, samples)
        self._began, self._ended, self._calls = rows[:epochs], rows[epochs:-1], rows[-1]

    def __getstate__(self) -> tuple[str, int, int]:
        return f"/proc/{os.getpid()}/fd/{self._memory}", len(self._calls), len(self._began)

    def __setstate__(self, state: tuple[str, int, int]) -> None:
        path, samples, epochs = state
        self._memory = os.open(path, os.O_RDWR)
        self._map(self._memory, samples, epochs)

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

    def done_before(self, moment: float, first_epoch: int, costs_s: NDArray[np.float64] | None = None) -> float:
        """Seconds of work done before ``moment`` for epochs from ``first_epoch`` on.

        ``costs_s``: what each sample's preparation counts, however long it took; of one that was under way a share.
        """
        began, ended = self._began[first_epoch:], self._ended[first_epoch:]
        early = (began > 0) & (began < moment)
        until = np.where(ended[early] > 0, np.minimum(ended[early], moment), moment)
        spent = until - began[early]
        if costs_s is None:
            return float(spent.sum())
        worth = np.broadcast_to(costs_s, began.shape)[early]
        over = (ended[early] > 0) & (ended[early] <= moment)
        return float(np.where(over, worth, np.minimum(spent, worth)).sum())


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
