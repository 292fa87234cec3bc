"""Data sets of the contract tests."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from minato_gpu import Source, read_bytes


class Costly(Dataset[Any]):
    """Sample ``i`` is ``i``; every seventh takes some hundred times longer than the others (fixed work, no clock)."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        total = sum(range(20_000 if index % 7 == 3 else 100))
        assert total > 0
        return torch.tensor(index)


class Made(Dataset[Any]):
    """Sample ``i`` is whatever ``make(i)`` returns (or raises)."""

    def __init__(self, length: int, make: Callable[[Any], Any]) -> None:
        self.length = length
        self.make = make

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.make(index)


class Deadly:
    """The sample of key ``at`` kills its worker, once."""

    def __init__(self, at: int, context: str = "fork") -> None:
        self.at, self.left = at, multiprocessing.get_context(context).Value("i", 1, lock=False)

    def __call__(self, key: int) -> Any:
        if key == self.at and self.left.value:
            self.left.value = 0
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(key)


class Sourced(Made):
    """As ``Made``, after reading a source, which is this very file."""

    def source(self, key: Any) -> Source:
        return Source(__file__)

    def __getitem__(self, index: Any) -> Any:
        assert len(read_bytes(self.source(index)))
        return super().__getitem__(index)


def draw(key: Any) -> list[Any]:
    """The key with draws from all three global generators; odd numbers of normal draws leave half a pair cached."""
    return [
        key,
        random.random(),
        random.gauss(0.0, 1.0),
        float(np.random.random_sample()),
        float(np.random.standard_normal()),
        float(torch.rand((), dtype=torch.float64)),
        float(torch.randn((), dtype=torch.float64)),
    ]


class Streams(IterableDataset[Any]):
    """Worker ``w`` yields pairs (w, 0), (w, 1), ..., ``sizes[w]`` of them; without workers, stream 0."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        for number in range(self.sizes[worker]):
            yield torch.tensor([worker, number])


class Counts(Streams):
    """Yields (worker, epoch, n); its state at the end of an epoch is that of the next one's beginning."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes)
        self.epoch = self.at = 0

    @property
    def worker(self) -> int:
        info = get_worker_info()
        return 0 if info is None else info.id

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.sizes[self.worker]:
            self.at += 1
            yield torch.tensor([self.worker, self.epoch, self.at - 1])
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


def rows(batches: Any) -> list[tuple[Any, ...]]:
    """The samples of batches of ``draw``'s lists, one tuple for each sample."""
    flat = []
    for batch in batches:
        columns = [column.tolist() if isinstance(column, torch.Tensor) else list(column) for column in batch]
        flat += list(zip(*columns, strict=True))
    return flat
