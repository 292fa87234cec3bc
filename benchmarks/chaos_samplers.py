"""What chaos runs draw from: samplers and streams with states of their own, and without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Order:
    """A user's own sampler: what is left of it must be stored with a state."""

    def __init__(self, order: list[int]) -> None:
        self.order = order

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.order))

    def __len__(self) -> int:
        return len(self.order)


class Eager:
    """One with a state that holds its order, drawn from a public generator for each epoch."""

    def __init__(self, length: int, generator: torch.Generator, *, repeats: bool) -> None:
        self.length = length
        self.generator = generator
        self.repeats = repeats
        self.at = 0
        self.order: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        if not self.order and self.repeats:
            self.order = torch.randint(self.length, (self.length,), generator=self.generator).tolist()
        elif not self.order:
            self.order = torch.randperm(self.length, generator=self.generator).tolist()
        while self.at < self.length:
            self.at += 1
            yield self.order[self.at - 1]
        self.at, self.order = 0, []

    def state_dict(self) -> dict[str, Any]:
        """Its own list, not a copy."""
        return {"at": self.at, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.at, self.order = state["at"], state["order"]


def torchdatas(name: str, length: int, generator: torch.Generator) -> Any:
    """torchdata's own samplers: one applies a state when it is asked for a key, the other's iterator has the state."""
    from torchdata.stateful_dataloader import sampler as samplers

    if name == "torchdata distributed":
        seed = generator.initial_seed()
        return samplers.StatefulDistributedSampler(_Sized(length), num_replicas=1, rank=0, shuffle=True, seed=seed)
    return samplers.RandomSampler(_Sized(length), generator=generator)


class _Sized(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


class Read(IterableDataset[Any]):
    """The samples of a map-style data set as a stream, shared out among workers, without a state."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.begun, self.struck = data.begun, data.struck
        self.at = 0  # samples of this worker's share

    def share(self) -> range:
        """This worker's keys."""
        info = get_worker_info()
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return range(number, len(self.data), workers)

    def __iter__(self) -> Iterator[Any]:
        return (self.data[key] for key in self.share())


class Streamed(Read):
    """The same with one: the data set's."""

    def __iter__(self) -> Iterator[Any]:
        share = self.share()
        while self.at < len(share):
            self.at += 1
            yield self.data[share[self.at - 1]]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        """How far it has come."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self.at = state["at"]


class Streaming(Read):
    """The same with one: its iterator's."""

    def __iter__(self) -> Iterator[Any]:
        return _Streaming(self)


class _Streaming:
    def __init__(self, stream: Read) -> None:
        self.stream = stream
        self.share = stream.share()
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.at >= len(self.share):
            raise StopIteration
        self.at += 1
        return self.stream.data[self.share[self.at - 1]]

    def state_dict(self) -> dict[str, int]:
        """How far it has come."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self.at = state["at"]
