"""Data sets shared by these tests; at module level, so that they can be pickled for spawned workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Numbers(Dataset[Any]):
    """``length`` samples; sample ``i`` is the 0-d integer tensor ``i``."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(int(index))


class Stream(IterableDataset[Any]):
    """Yields 0 to ``length - 1``; the workers share the numbers by striding (worker w takes w, w + n, ...)."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.length, step):
            yield torch.tensor(number)


class SizedStream(Stream):
    """A ``Stream`` that reports ``reported`` as its length, true or not."""

    def __init__(self, length: int, reported: int) -> None:
        super().__init__(length)
        self.reported = reported

    def __len__(self) -> int:
        return self.reported


class ProcessIds(Numbers):
    """Each sample is (index, id of the process that made it)."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([int(index), os.getpid()])


def keep(batch: Any) -> Any:
    """A collate function that changes nothing."""
    return batch


def numbers_in(batches: Any) -> list[Any]:
    """The samples of batches of numbers, flat, in the order of delivery."""
    return [int(number) for batch in batches for number in batch.reshape(-1)]


def as_lists(batches: Any) -> list[Any]:
    """The batches of numbers as nested lists, batch by batch."""
    return [batch.tolist() for batch in batches]
