"""Samplers of users that keep to little: to their length, to an end, to a generator of their own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch


class Counting:
    """A sampler whose state is how far it is: each epoch has an order of its own, in which keys may come again."""

    def __init__(self, samples: int = 20, *, told: int | None = None) -> None:
        self.samples = samples
        self.told = samples if told is None else told
        self.at = self.epoch_number = 0

    def __len__(self) -> int:
        return self.told

    def order(self) -> list[Any]:
        return random.Random(self.epoch_number).choices(range(self.samples), k=self.samples)

    def __iter__(self) -> Iterator[Any]:
        order = self.order()
        while self.at < len(order):
            self.at += 1
            yield order[self.at - 1]
        self.at, self.epoch_number = 0, self.epoch_number + 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch_number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch_number = state["at"], state["epoch"]


class Varying(Counting):
    """A batch sampler; its length is that of the epoch which it is in."""

    def __len__(self) -> int:
        return len(self.order())

    def order(self) -> list[list[int]]:
        return [[2 * k, 2 * k + 1] for k in range(10 - 2 * self.epoch_number)]


class Restarting(Counting):
    """Its own iterator, which begins anew when it is asked again after its end."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        order = self.order()
        if self.at == len(order):
            self.at, self.epoch_number = 0, self.epoch_number + 1
            raise StopIteration
        self.at += 1
        return order[self.at - 1]


class Refilling(Counting):
    """Empties a queue that it fills as it begins: its state after an epoch's last key is that before the next one."""

    def __init__(self, samples: int = 20) -> None:
        super().__init__(samples)
        self.left: list[int] = []

    def __iter__(self) -> Iterator[int]:
        if not self.left:
            self.left, self.epoch_number = self.order(), self.epoch_number + 1
        while self.left:
            yield self.left.pop()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.left = list(state["left"])


class Late(Counting):
    """Applies a state at its next iter(), and tells an older one until then."""

    def __init__(self, samples: int = 20) -> None:
        super().__init__(samples)
        self.loaded: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self.loaded is not None:
            super().load_state_dict(self.loaded)
        self.loaded = None
        yield from super().__iter__()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class Unstated(Counting):
    """Nothing is known of it, so what it still yields is stored."""

    state_dict = load_state_dict = None  # type: ignore[assignment]


class KeyByKey(Counting):
    """Draws each key when it is asked for it, from a public generator that is no part of its state."""

    def __init__(self, samples: int = 20) -> None:
        super().__init__(samples)
        self.generator = torch.Generator().manual_seed(6)

    def __iter__(self) -> Iterator[int]:
        while self.at < self.samples:
            self.at += 1
            yield int(torch.randint(self.samples, (), generator=self.generator))
        self.at = 0


class Forgetful(KeyByKey):
    """Its state tells too little: it goes on from a generator that nobody knows."""

    def __iter__(self) -> Iterator[int]:
        hidden = torch.Generator()
        hidden.seed()
        while self.at < self.samples:
            self.at += 1
            yield int(torch.randint(self.samples, (), generator=hidden if self.at % 2 else self.generator))
        self.at = 0
