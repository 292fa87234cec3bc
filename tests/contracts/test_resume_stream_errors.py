"""Save and resume of iterable data sets where something raises, or ends too early."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from minato_gpu import DataLoader
from tests.contracts.datasets import Streams
from tests.contracts.resuming import after, going_on, through_json


class Numbers(IterableDataset[Any]):
    """A stream with a state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 20:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class NumbersAgain(IterableDataset[Any]):
    """The same without one."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


def _refuses(samples: list[int]) -> list[int]:
    if 5 in samples:
        raise ValueError("five")
    return samples


@pytest.mark.parametrize("data", [Numbers, NumbersAgain])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_of_a_stream_that_cannot_be_joined(workers: int, data: Any) -> None:
    """The stream stands after it, whether it has a state of its own or is read again."""

    def make() -> Any:
        return DataLoader(data(), 4, num_workers=workers, collate_fn=_refuses)

    for more in (0, 1):
        loader = make()
        iterator = iter(loader)
        assert going_on(iterator, 2, ValueError) == 1
        for _ in range(more):
            next(iterator)
        state = through_json(loader.state_dict())
        # whose error has just been raised is tried again; a worker whose consumer went on is past it
        (own,) = state["source"]["streams"]
        assert own["batches"] == (1 if more == 0 else 3)
        assert (own["state"] is not None) == (data is Numbers)
        if more:
            resumed = make()
            resumed.load_state_dict(state)
            assert list(resumed) == [[12, 13, 14, 15], [16, 17, 18, 19]]
    assert next(iterator) == [12, 13, 14, 15]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_state_right_after_a_failed_batch_is_the_streams_own(workers: int) -> None:
    """``ahead`` counts the batch that failed as one: its own state came with it."""
    loader = DataLoader(Numbers(), 4, num_workers=workers, collate_fn=_refuses)
    iterator = iter(loader)
    assert going_on(iterator, 3, ValueError) == 1
    (own,) = loader.state_dict(ahead=1)["source"]["streams"]
    assert own["batches"] == 2 and own["state"] == {"of": "dataset", "state": {"at": 8}, "dataset": None}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_is_too_short(workers: int) -> None:
    state = after(DataLoader(Streams([9]), 4, num_workers=workers), 2)
    for batches in (3, 4):
        state["source"]["streams"][0]["batches"] = batches
        loader: Any = DataLoader(Streams([9]), 4, num_workers=workers)
        loader.load_state_dict(state)
        if batches == 3:  # the last one had a single sample
            assert list(loader) == []
        else:
            with pytest.raises(ValueError, match="4 batches of this stream delivered, but it yields only 9 samples"):
                list(loader)
