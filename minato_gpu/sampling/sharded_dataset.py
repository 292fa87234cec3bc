"""Iterable data sets that are resumed with another number of workers, or of ranks.

``SplitsStates`` is what the loader asks of such a data set. ``ShardedDataset`` is one, for any data in shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Protocol, TypeVar
from zlib import crc32

import numpy as np
import torch.distributed
from torch.utils.data import IterableDataset, get_worker_info

from minato_gpu.samples import JSON

MOST_SHARDS = 1 << 26
"""Most shards that a state may name: one with more is refused, as it may come from anywhere."""
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class SplitsStates(Protocol):
    """An iterable data set whose epoch can be resumed with another number of workers.

    ``state_dict`` and ``load_state_dict`` are those of torchdata: each worker's copy of the data set tells its own
    state after a batch, and a copy is given a state before ``iter()``. ``__iter__`` returns a generator, or another
    object that has no state of its own.
    """

    def state_dict(self) -> JSON:
        """Returns plain data that says what this worker has left of the epoch."""

    def load_state_dict(self, state: JSON) -> None:
        """Lets the next ``iter()`` yield what the state says is left."""

    def split_states(self, states: list[JSON], workers: int) -> Sequence[JSON]:
        """Shares out among so many workers what is left of the epoch.

        Called in the main process, by ``load_state_dict`` of a loader with another number of workers than the one
        that saved.

        Args:
            states: of the workers whose streams have not ended, in the order of workers. At the end of an epoch, and
                between two, those of all.
            workers: of the loader that resumes.

        Returns:
            One state for each worker. Together they say that everything is left which ``states`` say is left, each
            sample once.
        """


class Shards(Protocol[T_co]):
    """Data that is stored in shards (files, say), each of which can be read by itself. See ``ShardedDataset``."""

    def shards(self) -> Sequence[JSON]:
        """Returns the names of all shards: plain values such as paths or numbers.

        Called as each epoch begins or goes on, in every process: all must be given the same order, and an epoch that
        is resumed the order that it had.
        """

    def iterate(self, shard: JSON) -> Iterable[T_co]:
        """Yields the samples of one shard: the same, in the same order, each time."""


class ShardedDataset(IterableDataset[T]):
    """An iterable data set of shards that the workers of all ranks share out, and that can be resumed with any number
    of them.

    Of R ranks with W workers each, worker w of rank r reads the shards number r + R * w, and every R * W-th after that,
    one after the other. So there should be more shards than workers, of like size. A state says which of a worker's
    shards are left, and how many samples were delivered of the one that it is in.

    Resumed with as many workers, the epoch goes on as if nothing had happened. With another number, what is left is
    dealt out anew: first the rest of each shard that was begun, which is read again and dropped up to where it was
    left, then the others in turn. Each sample still comes exactly once; the order among shards, and which samples share
    a batch, become others. For another number of ranks all ranks load ``minato_gpu.merge_state_dicts`` of the states of
    all.

    Args:
        data: see ``Shards``; it is pickled where workers are spawned.
        num_replicas: ranks of a distributed job; None: as torch.distributed says, 1 where it is not initialised.
        rank: this one's number; None: as torch.distributed says, 0 where it is not initialised.

    Raises:
        ValueError: ``rank`` is none of ``num_replicas``.
    """

    def __init__(self, data: Shards[T], *, num_replicas: int | None = None, rank: int | None = None) -> None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if num_replicas is None:
            num_replicas = torch.distributed.get_world_size() if distributed else 1
        if rank is None:
            rank = torch.distributed.get_rank() if distributed else 0
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank must be one of the {num_replicas} from 0 on, got {rank}")
        self.data = data
        self.num_replicas, self.rank = num_replicas, rank
        self._loaded: _Left | None = None  # for the next iter()
        self._left = _Left(None, [], [])

    def __iter__(self) -> Iterator[T]:
        shards = list(self.data.shards())
        known = [len(shards), crc32(repr(shards).encode())]
        left, self._loaded = self._loaded, None
        if left is None:
            info, ranks = get_worker_info(), self.num_replicas
            worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
            left = _Left(known, [], [range(self.rank + ranks * worker, len(shards), ranks * workers)])
        elif (left.begun or left.numbers) and left.shards != known:  # at an epoch's end the next may have another order
            raise ValueError(
                f"the state is one of {left.shards and left.shards[0]} shards, and shards() now names {len(shards)}, "
                "or others; they must be the same, in the same order"
            )
        self._left = left
        return self._samples(shards, left)

    def _samples(self, shards: list[JSON], left: _Left) -> Iterator[T]:
        while left.begin_next():
            at = left.begun[0]
            number, delivered = at
            samples = iter(self.data.iterate(shards[number]))
            if sum(1 for _ in islice(samples, delivered)) < delivered:
                raise ValueError(
                    f"shard {shards[number]!r} has fewer samples than the {delivered} that were delivered of it before "
                    "the state was saved; its content must be the same"
                )
            for sample in samples:
                at[1] += 1
                yield sample
            left.begun.pop(0)

    def state_dict(self) -> dict[str, JSON]:
        """Returns what is left of this worker's share."""
        return (self._loaded or self._left).plain()

    def load_state_dict(self, state: Mapping[str, JSON]) -> None:
        """Lets the next ``iter()`` yield what the state says is left. Raises ValueError for what is no such state."""
        left = _Left.of(state)
        self._loaded = None if left.shards is None else left

    def split_states(self, states: list[JSON], workers: int) -> list[dict[str, JSON]]:
        """Shares out what is left (see ``SplitsStates``). Raises ValueError where the states do not belong together."""
        parts = [_Left.of(state) for state in states]
        whole = _Left(parts[0].shards, [], [])
        for part in parts:
            if part.shards != whole.shards:
                raise ValueError("the workers' states are of other shards")
            whole.begun += part.begun
            whole.numbers += part.numbers
        _Left.of(whole.plain())  # no shard is another worker's, too
        return [whole.share(worker, workers).plain() for worker in range(workers)]


class _Left:
    """The part of an epoch that a worker has left."""

    def __init__(self, shards: list[int] | None, begun: list[list[int]], numbers: list[range]) -> None:
        self.shards = shards  # how many the data set has, and a checksum of their names; None: no epoch has begun
        self.begun = begun  # pairs of a shard's number, and how many samples of it were delivered
        # ranges of the numbers of the shards that are not begun, in their order
        self.numbers = [part for part in numbers if part]

    @classmethod
    def of(cls, state: Mapping[str, JSON]) -> _Left:
        """Returns what ``plain`` made plain. Raises ValueError for anything else, and for a shard that comes twice."""
        try:
            if (shards := state["shards"]) is None:
                return cls(None, [], [])
            count, checksum = map(int, shards)
            begun = [[int(number), int(delivered)] for number, delivered in state["begun"]]
            found = cls([count, checksum], begun, [range(*map(int, part)) for part in state["numbers"]])
            if count <= MOST_SHARDS and found.names_each_once() and all(delivered >= 0 for _, delivered in begun):
                return found
        except (TypeError, KeyError, ValueError, OverflowError):
            pass
        raise ValueError(f"no state of a {ShardedDataset.__name__}, or a damaged one")

    def names_each_once(self) -> bool:
        """Returns whether the shards that are left are different ones of the data set's."""
        assert self.shards is not None
        seen = np.zeros(self.shards[0], np.bool_)
        for part in (*(range(number, number + 1) for number, _ in self.begun), *self.numbers):
            if part.step < 1 or part[0] < 0 or part[-1] >= len(seen):
                return False
            here = slice(part[0], part[-1] + 1, part.step)
            if seen[here].any():
                return False
            seen[here] = True
        return True

    def plain(self) -> dict[str, JSON]:
        """Returns plain data: a few numbers, and more for each time that what was left was dealt out again."""
        numbers = [[part.start, part.stop, part.step] for part in self.numbers]
        return {"shards": self.shards, "begun": [pair.copy() for pair in self.begun], "numbers": numbers}

    def share(self, worker: int, workers: int) -> _Left:
        """Returns one worker's part of this: as many shards as the others get, or one more or less."""
        numbers, dealt = list[range](), len(self.begun)
        for part in self.numbers:
            numbers.append(part[(worker - dealt) % workers :: workers])
            dealt += len(part)
        return _Left(self.shards, self.begun[worker::workers], numbers)

    def begin_next(self) -> bool:
        """Begins the next shard, if none is begun. Returns whether one is."""
        if not self.begun and self.numbers:
            first, *others = self.numbers
            self.begun = [[first[0], 0]]
            self.numbers = [first[1:], *others] if len(first) > 1 else others
        return bool(self.begun)
