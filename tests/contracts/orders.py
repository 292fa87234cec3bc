"""Samplers of the cases, and the order that they stand for: which keys come in which batch where nothing happens.

It is that of torch's own samplers, drawn from the generators in the order in which PyTorch's loader draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler, RandomSampler

from tests.contracts.cases import BAD, DRAWN, LISTED, SAMPLES, SHARDS, STREAM_OF, STREAMS, Case
from tests.contracts.material import NO_KEYS
from tests.contracts.samplers import Restarting

SEED = 11
Keys = list[int]


class Listed:
    """A sampler of which nothing is known but what it yields: here and there an integer of NumPy or (where the order is
    not stored) of PyTorch, the same key, unless it is ``plain``. With ``fails`` it raises after some."""

    def __init__(self, *, fails: bool = False, tensors: bool = False, plain: bool = False) -> None:
        self.fails = fails
        self.kinds: tuple[Any, ...] = (int,) if plain else (int, np.int64, torch.tensor if tensors else np.int32)

    def __iter__(self) -> Iterator[Any]:
        for number, key in enumerate(LISTED):
            if self.fails and number == DRAWN:
                raise OSError(NO_KEYS)
            yield self.kinds[number % len(self.kinds)](key)

    def __len__(self) -> int:
        return len(LISTED)


def batches() -> list[list[int]]:
    """Batches of a user's own."""
    order = list(LISTED)
    return [order[start : start + 1 + start % 4] for start in range(0, len(order) - 4, 3)]


def sampler_of(case: Case, rank: int) -> dict[str, Any]:
    """The arguments that say where the order comes from."""
    drawn = torch.Generator().manual_seed(SEED + 1)
    keys: Any = range(SAMPLES)
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "none": dict,
        "sequential": dict,
        "shuffle=True": lambda: {"shuffle": True},
        "shuffled": lambda: {"sampler": RandomSampler(keys, generator=drawn)},
        "repeats": lambda: {"sampler": RandomSampler(keys, replacement=True, generator=drawn)},
        "stateful": lambda: {"sampler": Restarting(SAMPLES)},
        "listed": lambda: {
            "sampler": Listed(fails=case.fault == "sampler raises", tensors=case.interruption in ("none", "left"))
        },
        "plainly listed": lambda: {"sampler": Listed(plain=True)},
        "batches": lambda: {"batch_sampler": batches()},
        "distributed": lambda: {"sampler": DistributedSampler(keys, case.ranks, rank, seed=SEED)},
    }
    return makers[case.sampler]()


def orders(case: Case, rank: int) -> list[list[Keys]]:
    """The batches of each epoch, as keys, if nothing happens and nothing is overtaken."""
    if case.streams:
        return [_of_streams(case)] * case.epochs
    generator = torch.Generator().manual_seed(SEED)
    arguments = sampler_of(case, rank)
    sampler: Any = arguments.get("sampler") or arguments.get("batch_sampler") or range(SAMPLES)
    found = []
    for epoch in range(case.epochs):
        if case.stay != "persistent" or epoch == 0:
            torch.empty((), dtype=torch.int64).random_(generator=generator)  # the epoch's seed
        if case.sampler == "shuffle=True":
            sampler = RandomSampler(range(SAMPLES), generator=generator)
        if case.sampler == "distributed":
            sampler.set_epoch(epoch)
        keys: list[Any] = list(LISTED) if case.sampler == "listed" else list(sampler)
        found.append(keys if case.sampler == "batches" else _batched(case, keys))
    return found


def _batched(case: Case, keys: Keys) -> list[Keys]:
    size = case.batch or 1
    batches = [keys[at : at + size] for at in range(0, len(keys), size)]
    return [batch for batch in batches if len(batch) == size or not case.drop_last]


def _of_streams(case: Case) -> list[Keys]:
    """A batch of each worker's stream in turn."""
    each = [_batched(case, stream_of(case, worker)) for worker in range(max(1, case.workers))]
    return [batch for turn in zip_longest(*each) for batch in turn if batch is not None]


def stream_of(case: Case, worker: int) -> Keys:
    """The keys of a worker's stream."""
    workers, keys = max(1, case.workers), [worker * STREAM_OF + n for n in range(STREAMS[worker])]
    if case.data == "stateful shards":
        keys = [key for part in range(worker, len(SHARDS), workers) for key in keys_of_part(part)]
    elif case.data == "stateful split":
        keys = [key for part in range(len(SHARDS)) for key in keys_of_part(part)][worker::workers]
    if case.fault == "raise" and case.data != "stateful iterator" and BAD in keys:  # a generator that has raised
        return keys[: keys.index(BAD) + 1]
    return keys


def keys_of_part(part: int) -> Keys:
    """The keys of a shard."""
    return [part * STREAM_OF + n for n in range(SHARDS[part])]
