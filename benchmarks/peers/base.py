"""One face for every loader: what it is asked to do, and what a benchmark must know about it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np
import torch


@dataclass(frozen=True)
class Job:
    """Batches of ``batch_size`` samples of ``dataset``, in index order, by ``workers`` processes or threads.

    ``keep_workers``: several epochs follow, so a loader that can keep its workers between epochs does.
    ``sample_bytes``: what one prepared sample takes, on average. ``collate`` joins a list of samples (None: arrays of
    one shape, stacked). ``source`` and ``pipeline``, where there are any: what ``dataset`` prepares its samples from,
    for loaders that can have the steps apart; their random values then come from a generator seeded with 0.
    ``shuffle_seed``: not in index order, but in a new order for each epoch. Worker processes are forked.
    """

    dataset: Any
    batch_size: int
    workers: int
    sample_bytes: int
    keep_workers: bool = False
    collate: Callable[[list[Any]], Any] | None = None
    source: Any = None
    pipeline: Any = None
    shuffle_seed: int | None = None

    @property
    def join(self) -> Callable[[list[Any]], Any]:
        """What makes a batch of samples."""
        return self.collate or np.stack

    @property
    def batch_bytes(self) -> int:
        """Bytes of a full batch."""
        return self.batch_size * self.sample_bytes

    @property
    def batches(self) -> list[list[int]]:
        """The indices of each batch, in index order; the last one may be short."""
        return self.cut(range(len(self.dataset)))

    @property
    def shuffling(self) -> dict[str, Any]:
        """The arguments by which PyTorch's loader, and one with its face, shuffles."""
        if self.shuffle_seed is None:
            return {}
        return {"shuffle": True, "generator": torch.Generator().manual_seed(self.shuffle_seed)}

    def epoch(self, number: int) -> list[int]:
        """The indices in the order of that epoch, for loaders that bring no sampler of their own."""
        count = len(self.dataset)
        if self.shuffle_seed is None:
            return list(range(count))
        indices: list[int] = np.random.default_rng((self.shuffle_seed, number)).permutation(count).tolist()
        return indices

    def cut(self, indices: Sequence[int]) -> list[list[int]]:
        """The batches of such indices; the last one may be short."""
        return [list(indices[lo : lo + self.batch_size]) for lo in range(0, len(indices), self.batch_size)]


class Order:
    """What the sampler yields: a job's indices, or lists of them ``by_batch``; each ``iter`` is the next epoch."""

    def __init__(self, job: Job, by_batch: bool) -> None:
        self._job = job
        self._by_batch = by_batch
        self._epoch = 0

    def __len__(self) -> int:
        count = len(self._job.dataset)
        return -(-count // self._job.batch_size) if self._by_batch else count

    def __iter__(self) -> Iterator[Any]:
        indices = self._job.epoch(self._epoch)
        self._epoch += 1
        return iter(self._job.cut(indices) if self._by_batch else indices)


@dataclass(frozen=True)
class Loader:
    """An adapter, with its settings. What it starts ends with the measuring process, which is killed.

    ``name`` goes into the rows; ``package`` is the module that is needed. ``own_draws``: random values are the loader's
    own, so batches are the same work as everybody else's but not the same samples.
    """

    package: ClassVar[str]
    own_draws: ClassVar[bool] = False
    late: ClassVar[str] = "completion"

    name: str

    @property
    def in_order(self) -> bool:
        """Whether samples come in the sampler's order."""
        return True

    @property
    def order(self) -> str:
        """How far a sample may come from its place: ``in order``, ``bounded`` (at most eight batches late), or
        ``completion`` (no limit)."""
        return "in order" if self.in_order else self.late

    def can_run(self, job: Job) -> bool:
        """Whether it does work of this kind."""
        return True

    def settings(self, job: Job) -> dict[str, Any]:
        """The settings in force, for the report."""
        raise NotImplementedError

    def described(self, job: Job) -> str:
        """The settings in words."""
        return ", ".join(f"{name}={value}" for name, value in self.settings(job).items())

    def make(self, job: Job) -> Iterable[Any]:
        """The loader. Each ``iter`` of it is one epoch; each item a batch of shape (samples, words) of int64."""
        raise NotImplementedError


def take_one(loader: Loader, job: Job) -> None:
    """Take one batch: in a process of its own, so that what the loader reads from files lies in the page cache.

    Otherwise whoever has not run for some minutes reads it from the disk within its first batch (40 ms, seen here).
    """
    for _ in loader.make(job):
        break


def fetched(dataset: Any, indices: list[int]) -> list[Any]:
    """The samples of a batch, by one call where the data set has ``__getitems__``, as PyTorch asks for them."""
    many = getattr(dataset, "__getitems__", None)
    samples: list[Any] = many(indices) if many else [dataset[index] for index in indices]
    return samples


def available(package: str) -> bool:
    """Whether the module is there. It is not imported, only what it is part of."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def installed(loader: Loader) -> bool:
    """Whether the adapter's package is here. It is imported, so that no measurement pays for that."""
    if not available(loader.package):
        return False
    importlib.import_module(loader.package)
    return True
