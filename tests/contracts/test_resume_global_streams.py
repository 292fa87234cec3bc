"""Save and resume of iterable data sets without workers, which draw from the global generators of the main process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from minato_gpu import DataLoader
from minato_gpu.checkpoint import process_generators
from tests.contracts.resume_global_program import seed
from tests.contracts.resuming import after, through_json


class _Shuffled(IterableDataset[Any]):
    """Draws its order as an epoch begins: in ``iter()``, or (``late``) with the first sample; and more with each."""

    def __init__(self, *, late: bool) -> None:
        self.late = late

    def __iter__(self) -> Iterator[Any]:
        return self._samples() if self.late else iter(self._rows(torch.randperm(20).tolist()))

    def _samples(self) -> Iterator[Any]:
        yield from self._rows(np.random.permutation(20).tolist())

    def _rows(self, order: list[int]) -> Iterator[Any]:
        for index in order:
            yield [index, random.gauss(0.0, 1.0), torch.rand(()).item()]


class _Stateful(_Shuffled):
    """One that knows how far it has come; its state is large, so that it is told every few batches only."""

    def __init__(self) -> None:
        super().__init__(late=True)
        self.order: list[int] = []
        self.large = "x" * (1 << 15)

    def _samples(self) -> Iterator[Any]:
        self.order = self.order or np.random.permutation(20).tolist()
        while self.order:
            yield next(self._rows([self.order.pop()]))

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order), "large": self.large}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = state["order"]


_STREAMS: dict[str, Callable[[], Any]] = {
    "at iter": lambda: _Shuffled(late=False),
    "late": lambda: _Shuffled(late=True),
    "state": _Stateful,
}


@pytest.mark.parametrize("kind", _STREAMS)
def test_a_stream_that_draws(kind: str) -> None:
    """Read again in the order that it had, and what comes then is drawn as it would have been."""

    def new() -> Any:
        return DataLoader(_STREAMS[kind](), 1, collate_fn=list)

    seed(5)
    loader = new()
    reference = [list(loader) for _ in range(3)]
    for stop in (0, 1, 17, 18, 20):
        seed(5)
        loader = new()
        iterator = iter(loader)
        first = [next(iterator) for _ in range(stop)]
        state = through_json(loader.state_dict())
        assert stop < 17 or len(first) == stop
        seed(99)
        resumed = new()
        resumed.load_state_dict(state)
        iterator = iter(resumed)
        again = through_json(resumed.state_dict())  # saved once more
        assert again["global"] == state["global"]
        assert [first + list(iterator), list(resumed), list(resumed)] == reference, stop
        seed(98)
        resumed = new()
        resumed.load_state_dict(again)
        assert [first + list(resumed), list(resumed)] == reference[:2], stop


@pytest.mark.parametrize("kind", ["at iter", "state"])
def test_the_users_own_wins_for_a_stream(kind: str) -> None:
    """What is read again puts the others back, and not this one."""
    state = after(DataLoader(_STREAMS[kind](), 1, collate_fn=list), 0)
    seed(2)
    resumed: Any = DataLoader(_STREAMS[kind](), 1, collate_fn=list)
    resumed.load_state_dict(state)
    random.seed(7)
    own = process_generators.every()["python"]
    iter(resumed)
    assert process_generators.every() == {**process_generators.checked(state["global"]), "python": own}
