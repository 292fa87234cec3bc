"""Save and resume of iterable data sets where something raises, or ends too early."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from minato_gpu import DataLoader
from tests.contracts.datasets import Streams
from tests.contracts.resuming import after, going_on, interrupted, through_json


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


class Flaky(IterableDataset[Any]):
    """A stream without a state whose iterator raises at these numbers, as often as they say, and goes on: without the
    number where that is ``lost``."""

    def __init__(self, bad: dict[int, int], *, lost: bool) -> None:
        self.bad, self.lost = bad, lost

    def __iter__(self) -> Any:
        return _Flaky(dict(self.bad), lost=self.lost)


class _Flaky:
    def __init__(self, bad: dict[int, int], *, lost: bool) -> None:
        self.bad, self.lost, self.at = bad, lost, 0

    def __next__(self) -> int:
        if self.bad.get(self.at, 0) > 0:
            self.bad[self.at] -= 1
            self.at += self.lost
            raise OSError("no network")
        if self.at == 16:
            raise StopIteration
        self.at += 1
        return self.at - 1


def _going_on(iterator: Iterator[Any], batches: int) -> tuple[list[Any], int]:
    """So many batches, and how often it raised before it had brought them."""
    got, raised = list[Any](), 0
    while len(got) < batches:
        try:
            got.append(next(iterator))
        except StopIteration:
            break
        except OSError:
            raised += 1
    return got, raised


@pytest.mark.parametrize("bad", [{4: 1}, {5: 1}, {5: 2}, {0: 1, 7: 1}], ids=["at once", "within", "twice", "two"])
@pytest.mark.parametrize("lost", [True, False], ids=["lost", "comes"])
@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_raised_and_went_on(workers: int, batch_size: Any, lost: bool, bad: dict[int, int]) -> None:
    """What a failed batch had taken is dropped, and no more; and errors that were told are not told again."""

    def make(bad: dict[int, int]) -> Any:
        return DataLoader(Flaky(bad, lost=lost), batch_size, num_workers=workers, collate_fn=str)

    for batches in (3, 4):
        loader = make(bad)
        iterator = iter(loader)
        first, told = _going_on(iterator, batches)
        state = through_json(loader.state_dict())
        rest = _going_on(iterator, 99)
        for comes_again in [bad] if lost or told < sum(bad.values()) else [bad, {}]:
            resumed = make(comes_again)
            resumed.load_state_dict(state)
            iterator = iter(resumed)
            assert through_json(resumed.state_dict())["source"] == state["source"], (first, comes_again)
            got, raised = _going_on(iterator, 99)
            assert got == rest[0] and raised == (rest[1] if comes_again else 0), (first, comes_again)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_that_was_told_last_is_not_told_again(workers: int) -> None:
    """And one that nobody was told of is."""

    def make(bad: dict[int, int]) -> Any:
        return DataLoader(Flaky(bad, lost=False), 2, num_workers=workers, collate_fn=list)

    loader = make({4: 1})
    first, raised = _going_on(iter(loader), 3)
    assert (first[-1], raised) == ([4, 5], 1)
    state = through_json(loader.state_dict(ahead=1))
    for bad, more in (({4: 1}, 0), ({}, 0), ({4: 2}, 1), ({4: 1, 6: 1}, 1)):
        resumed = make(bad)
        resumed.load_state_dict(state)
        assert _going_on(iter(resumed), 3) == ([[4, 5], [6, 7], [8, 9]], more), bad
    resumed = make({2: 1})
    resumed.load_state_dict(state)
    with pytest.raises(OSError, match="no network"):
        next(iter(resumed))


@pytest.mark.parametrize(
    ("failed", "message"),
    [
        (7, "'failed' must be a list"),
        ([7], "'failed' must hold pairs"),
        ([[0, 1, 2]], "'failed' must hold pairs"),
        ([[0, 3]], "'failed' must be a whole number from 0 to 2"),
        ([[2, 0]], "'failed' must be a whole number from 0 to 1"),
        ([[1, 0], [0, 0]], "'failed' must be a whole number from 2 to 1"),
        ([[0, -1]], "'failed' must be a whole number from 0 to 2"),
    ],
)
def test_damaged_failures(failed: Any, message: str) -> None:
    _, state, resumed = interrupted(lambda: DataLoader(NumbersAgain(), 2), 2)
    assert state["source"]["streams"][0]["failed"] == []
    state["source"]["streams"][0]["failed"] = failed
    with pytest.raises(ValueError, match=message):
        resumed.load_state_dict(state)


def test_a_state_that_says_nothing_of_failures() -> None:
    """As earlier versions saved it."""
    _, state, resumed = interrupted(lambda: DataLoader(NumbersAgain(), 2, collate_fn=list), 2)
    del state["source"]["streams"][0]["failed"]
    resumed.load_state_dict(state)
    assert next(iter(resumed)) == [4, 5]
