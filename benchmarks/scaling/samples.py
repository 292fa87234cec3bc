"""What the cells prepare: samples that sleep for their cost and then are an array, a tensor, a dict.

Slept takes no core, so that many workers fit on few: only what loaders themselves spend is real. Every kind of
sample is integers that begin with the sample's index, so that one consumer reads and checks them all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from benchmarks.peers import Job, Loader
from benchmarks.peers.minato import Minato
from benchmarks.peers.pytorch import PyTorch
from benchmarks.scaling.cells import BATCH_SIZE, Cell
from benchmarks.work import TRIVIAL_WORDS, Consumer, Int64, Slept, WorkLog

_LARGE_WORDS = 75_000  # 600 KB
_MOST_IN_FLIGHT = 4 << 30  # bytes: a loader that asks for more is left out
_TOKENS = 512
_RAGGED = 5  # lengths, of which the longest is an array's


class Tensors(Slept):
    """Tensors."""

    def sample(self, index: int) -> Any:
        return torch.from_numpy(self.row(index))


class Ragged(Slept):
    """Tensors of several lengths."""

    def sample(self, index: int) -> Any:
        return torch.from_numpy(self.row(index))

    def row(self, index: int) -> Int64:
        row = super().row(index)
        return row[: len(row) * (1 + index % _RAGGED) // _RAGGED]


class Tokens(Slept):
    """What a tokeniser gives: a dict of three tensors of one length."""

    def sample(self, index: int) -> Any:
        ids = torch.from_numpy(self.row(index))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


class Many(Slept):
    """A data set with ``__getitems__``: one call, one sleep of all their costs."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        epochs = [self._log.begin(index) for index in indices] if self._log is not None else []
        time.sleep(float(self.costs_s[list(indices)].sum()))
        samples = [self.sample(index) for index in indices]
        for index, epoch in zip(indices, epochs, strict=bool(epochs)):
            self._log.end(index, epoch)  # type: ignore[union-attr]
        return samples


def pad(samples: list[Any]) -> Any:
    """A user's ``collate_fn``: as long as the longest, filled with zeros."""
    return pad_sequence(samples, batch_first=True)


@dataclass(frozen=True)
class Kind:
    """A kind of data, or a way to start or guard workers. ``budget``: host memory for half of the usual window."""

    dataset: type[Slept] = Slept
    words: int = TRIVIAL_WORDS
    collate: Any = None
    context: str = "fork"
    replace: bool = False
    budget: bool = False


KINDS: dict[str, Kind] = {
    "arrays": Kind(),
    "tensors": Kind(Tensors, _LARGE_WORDS),
    "ragged": Kind(Ragged, collate=pad),
    "tokens": Kind(Tokens, _TOKENS),
    "getitems": Kind(Many),
    "spawn": Kind(context="spawn"),
    "replace": Kind(replace=True),
    "budget": Kind(budget=True),
}
"""``--kind``. All but the first are for loaders with PyTorch's face."""


class Reader(Consumer):
    """Reads every byte of a batch of any kind."""

    def read(self, batch: Any) -> int:
        if not isinstance(batch, dict):
            return super().read(batch)
        for name in batch.keys() - {"input_ids"}:
            batch[name].numpy().sum(axis=1)
        return super().read(batch["input_ids"])


def dataset(cell: Cell, costs_s: NDArray[np.float64], log: WorkLog | None = None) -> Slept:
    """The samples of a cell."""
    kind = KINDS[cell.kind]
    return kind.dataset(costs_s, kind.words, log)


def expected(samples: Slept) -> Int64:
    """The sum of each sample's numbers, without its sleep."""
    return np.array([samples.row(index).sum() for index in range(len(samples))], dtype=np.int64)


def job(cell: Cell, samples: Slept) -> Job:
    """What a cell asks of a loader: several epochs, each in another order."""
    kind = KINDS[cell.kind]
    chosen: dict[str, Any] = {"keep_workers": True, "shuffle_seed": 5, "context": kind.context}
    return Job(samples, BATCH_SIZE, cell.workers, 8 * kind.words, collate=kind.collate, **chosen)


def fitting(cell: Cell, loaders: Sequence[Loader]) -> list[Loader]:
    """Those that the cell's kind of data is for, with the kind's options."""
    kind = KINDS[cell.kind]
    if kind == Kind():
        return list(loaders)
    options: list[tuple[str, Any]] = [("on_worker_death", "replace")] if kind.replace else []
    if kind.budget:
        options.append(("host_memory_budget", cell.workers * BATCH_SIZE * 8 * kind.words))
    most = _MOST_IN_FLIGHT // (cell.workers * BATCH_SIZE * 8 * kind.words)  # batches for each worker
    return [
        replace(each, options=tuple(options)) if isinstance(each, Minato) else each
        for each in loaders
        if isinstance(each, Minato) or (isinstance(each, PyTorch) and each.prefetch_factor <= most)
    ]
