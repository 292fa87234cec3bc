"""What benchmarks have loaders do: fixed work, samples that cost so much, the consumer that checks them, and the bound.

Work is so many bytes hashed with SHA-256, never a wait on a clock. Decisions: hashing, because its cost is linear in
the number of operations, does not depend on the data or on memory bandwidth, and because ``hashlib`` gives up the
interpreter lock while it runs, as image decoders do; so the loaders with threads are not held back by the interpreter.
The number of operations that a millisecond buys is calibrated once for a run and then stays, so that every loader does
the same work whatever the clock says. Other samples sleep, which takes no core: many workers then fit on few.

A sample is one row of 64-bit integers: its index first, then (of ``Costly``) a digest of the work that was done for it,
then numbers that depend on the index. The consumer adds up every row, so it reads every byte of every batch; sums and
indices are kept and compared after the clock has stopped, with what a single process got from the same data set.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Costs = NDArray[np.float64]
TRIVIAL_WORDS = 1536  # 12 KiB

# Preprocessing time of a sample of KiTS19 (MinatoLoader, table of section 2): least, median, 75th and 90th
# percentile, most, in milliseconds.
_KITS19_QUANTILES = (0.0, 0.5, 0.75, 0.9, 1.0)
_KITS19_MS = (10.0, 470.0, 630.0, 750.0, 2230.0)
_KITS19_SCALE = 1 / 160

_BLOCK = memoryview(bytes(range(256)) * 256)  # 64 KiB: hashed in one call that releases the lock
_OPERATION_BYTES = 1024
_PER_BLOCK = len(_BLOCK) // _OPERATION_BYTES


def work(operations: int, seed: int) -> int:
    """Do ``operations`` units of work (1 KiB of hashing each); 63 bits that depend on all of it and on ``seed``."""
    digest = hashlib.sha256(seed.to_bytes(8, "little"))
    for _ in range(operations // _PER_BLOCK):
        digest.update(_BLOCK)
    digest.update(_BLOCK[: operations % _PER_BLOCK * _OPERATION_BYTES])
    return int.from_bytes(digest.digest()[:8], "little") >> 1


def compute(seconds: float) -> None:
    """Hash until this thread has spent so long on a core."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        hashlib.blake2b(b"x" * 2000).digest()


def calibrate() -> float:
    """Operations that one core does in a millisecond: the median of seven trials."""
    rates, operations = [], 20_000
    for trial in range(7):
        start = time.perf_counter()
        work(operations, trial)
        rates.append(operations / (time.perf_counter() - start) / 1e3)
    return float(np.median(rates))


def sleep_overshoot_s() -> float:
    """By how many seconds ``time.sleep`` of about a millisecond is late here: the median of fifty."""
    late = []
    for _ in range(50):
        start = time.perf_counter()
        time.sleep(1e-3)
        late.append(time.perf_counter() - start - 1e-3)
    return max(0.0, float(np.median(late)))


# --- data sets -------------------------------------------------------------------------------------------------------


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


class _Logged:
    """Sample ``i`` is ``words`` 64-bit integers that depend on ``i``; ``log`` notes when each is prepared."""

    def __init__(self, costs: NDArray[Any], words: int = TRIVIAL_WORDS, log: WorkLog | None = None) -> None:
        self._costs = costs
        self._base = np.arange(words, dtype=np.int64)
        self._log = log

    def __len__(self) -> int:
        return len(self._costs)

    def __getitem__(self, index: int) -> Int64:
        epoch = self._log.begin(index) if self._log is not None else 0
        row = self._base + index
        self._prepare(index, row)
        if self._log is not None:
            self._log.end(index, epoch)
        return row

    def _prepare(self, index: int, row: Int64) -> None:
        raise NotImplementedError


class Costly(_Logged):
    """Sample ``i`` costs ``costs[i]`` units of work, of which its second number is a digest."""

    def _prepare(self, index: int, row: Int64) -> None:
        row[1] = work(int(self._costs[index]), index)


class Slept(_Logged):
    """Sample ``i`` sleeps for ``costs[i]`` seconds."""

    def _prepare(self, index: int, row: Int64) -> None:
        time.sleep(float(self._costs[index]))


def kits19(samples: int, workers: int, rng: np.random.Generator) -> Costs:
    """KiTS19's preprocessing times, a hundred and sixtieth of them: linear between the published percentiles."""
    return np.interp(rng.random(samples), _KITS19_QUANTILES, _KITS19_MS) * _KITS19_SCALE


# --- the consumer ----------------------------------------------------------------------------------------------------


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


def step(consumer: Consumer, batch: Any, seconds: float) -> None:
    """The emulated training step: read every byte, then sleep until the step is over."""
    until = time.perf_counter() + seconds
    consumer.read(batch)
    rest = until - time.perf_counter()
    if rest > 0:
        time.sleep(rest)


# --- the bound -------------------------------------------------------------------------------------------------------


def first_batch_s(costs_s: NDArray[np.floating[Any]], cores: int) -> float:
    """The least seconds for a batch of samples of these costs (CPU seconds), on all cores."""
    return max(float(costs_s.max()), float(costs_s.sum()) / cores)


def bound_s(first_s: float, work_s: float, steps_s: float, cores: int, ahead_s: float, left_s: float) -> float:
    """The least seconds for what was done between the clock's start and its end.

    That is a first batch (``first_s``), then ``work_s`` of work or ``steps_s`` of steps, whichever is longer.
    ``ahead_s`` of that work had been done before; ``left_s`` more was done for later epochs (CPU seconds).
    """
    working_s = max(0.0, work_s - ahead_s + left_s) / cores
    return max(0.0, first_s - ahead_s / cores) + max(steps_s, working_s)
