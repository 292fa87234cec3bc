"""One face for every loader: what it is asked to do, and what a benchmark must know about it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch


@dataclass(frozen=True)
class Job:
    """Batches of ``batch_size`` samples of ``dataset``, in index order, by ``workers`` processes or threads.

    ``keep_workers``: several epochs follow, so a loader that can keep its workers between epochs does.
    ``sample_bytes``: what one prepared sample takes, on average. ``collate`` joins a list of samples (None: arrays of
    one shape, stacked). ``source`` and ``pipeline``, where there are any: what ``dataset`` prepares its samples from,
    for loaders that can have the steps apart; their random values then come from a generator seeded with 0.
    ``shuffle_seed``: not in index order, but in a new order for each epoch. ``context``: how worker processes start.
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
    context: str = "fork"

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

    def order(self, by_batch: bool) -> Order:
        """What the sampler yields, an epoch with each ``iter``: indices, or lists of them ``by_batch``."""
        return Order(self, by_batch)

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
    """A job's indices, or its batches of them; each ``iter`` is the next epoch."""

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


class Packaged(Protocol):
    """``name`` goes into the rows; ``package`` is the module that is needed."""

    @property
    def name(self) -> str: ...

    @property
    def package(self) -> str: ...


Chosen = TypeVar("Chosen", bound=Packaged)


class Loader(Packaged, Protocol):
    """An adapter.

    ``order`` says how far a sample may be delivered from its place: ``in order``, ``bounded`` (at most eight batches
    late) or ``completion`` (no limit). ``warm`` says whether workers live on between epochs of a job that keeps them.
    """

    @property
    def order(self) -> str: ...

    @property
    def warm(self) -> bool: ...

    def settings(self, job: Job) -> dict[str, Any]:
        """The settings in force, for the report."""

    def make(self, job: Job) -> Iterable[Any]:
        """The loader. Each ``iter`` of it is one epoch; each item a batch of shape (samples, words) of int64."""

    def close(self, loader: Any) -> None:
        """End its workers and give back its shared memory."""


def fetched(dataset: Any, indices: list[int]) -> list[Any]:
    """The samples of a batch, by one call where the data set has ``__getitems__``, as PyTorch asks for them."""
    many = getattr(dataset, "__getitems__", None)
    samples: list[Any] = many(indices) if many else [dataset[index] for index in indices]
    return samples


class Epochs:
    """An iterable over ``source`` that the adapter can close; each ``iter`` is one epoch."""

    def __init__(self, source: Iterable[Any]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)


def installed(loader: Packaged) -> bool:
    """Whether the adapter's package is here. It is imported, so that no measurement pays for that."""
    root = loader.package.partition(".")[0]
    if importlib.util.find_spec(root) is None or importlib.util.find_spec(loader.package) is None:
        return False
    importlib.import_module(loader.package)
    return True


def choose(loaders: Sequence[Chosen], wanted: Sequence[str]) -> list[Chosen]:
    """Those whose name contains one of the ``wanted`` words (all, if none); ValueError for a word that fits none."""
    for word in wanted:
        if not any(word in loader.name for loader in loaders):
            raise ValueError(f"no loader is called {word!r}; there are: {', '.join(each.name for each in loaders)}")
    return [each for each in loaders if not wanted or any(word in each.name for word in wanted)]


@dataclass(frozen=True)
class Reader:
    """A loader, and the class of the data set that reads for it."""

    loader: Loader
    dataset: Any

    @property
    def name(self) -> str:
        return self.loader.name

    @property
    def package(self) -> str:
        return self.loader.package

    @property
    def order(self) -> str:
        return self.loader.order
