"""One face for every loader: what it is asked to do, and what a benchmark must know about it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class Job:
    """Batches of ``batch_size`` samples of ``dataset``, in index order, by ``workers`` processes or threads.

    ``keep_workers``: several epochs follow, so a loader that can keep its workers between epochs does.
    ``sample_bytes``: what one prepared sample takes, on average. ``collate`` joins a list of samples (None: arrays of
    one shape, stacked). ``source`` and ``pipeline``, where there are any: what ``dataset`` prepares its samples from,
    for loaders that can have the steps apart; their random values then come from a generator seeded with 0.
    """

    dataset: Any
    batch_size: int
    workers: int
    sample_bytes: int
    keep_workers: bool = False
    collate: Callable[[list[Any]], Any] | None = None
    source: Any = None
    pipeline: Any = None

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
        """The indices of each batch, in order; the last one may be short."""
        count = len(self.dataset)
        return [list(range(lo, min(lo + self.batch_size, count))) for lo in range(0, count, self.batch_size)]


class Loader(Protocol):
    """An adapter. ``name`` goes into the rows; ``package`` is the module that it needs.

    ``order`` says how far a sample may be delivered from its place: ``in order``, ``bounded`` (at most eight batches
    late) or ``completion`` (no limit). ``warm`` says whether workers live on between epochs of a job that keeps them.
    """

    @property
    def name(self) -> str: ...

    @property
    def package(self) -> str: ...

    @property
    def order(self) -> str: ...

    @property
    def warm(self) -> bool: ...

    def settings(self, job: Job) -> dict[str, Any]:
        """The settings in force, for the report."""

    def make(self, job: Job) -> Iterable[Any]:
        """The loader. Each ``iter`` of it is one epoch; each item a batch of shape (samples, words) of int64."""

    def peak_bytes_in_flight(self, loader: Any, job: Job) -> int:
        """Bytes prepared and not delivered, at most: what the loader counted, or what its settings allow."""

    def close(self, loader: Any) -> None:
        """End its workers and give back its shared memory."""


class Epochs:
    """An iterable over ``source`` that the adapter can close; each ``iter`` is one epoch."""

    def __init__(self, source: Iterable[Any]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)


def installed(loader: Loader) -> bool:
    """Whether the adapter's package is here. It is imported, so that no measurement pays for that."""
    root = loader.package.partition(".")[0]
    if importlib.util.find_spec(root) is None or importlib.util.find_spec(loader.package) is None:
        return False
    importlib.import_module(loader.package)
    return True


def choose(loaders: Sequence[Loader], wanted: Sequence[str]) -> list[Loader]:
    """Those whose name contains one of the ``wanted`` words (all, if none); ValueError for a word that fits none."""
    for word in wanted:
        if not any(word in loader.name for loader in loaders):
            raise ValueError(f"no loader is called {word!r}; there are: {', '.join(each.name for each in loaders)}")
    return [each for each in loaders if not wanted or any(word in each.name for word in wanted)]
