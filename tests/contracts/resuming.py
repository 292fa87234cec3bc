"""What the tests of save and resume share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from minato_gpu import DataLoader
from tests.contracts.test_resume import through_json

DATA: Any = list(range(40))


def loader_of(sampler: Any = None, **more: Any) -> Any:
    return DataLoader(DATA, 4, sampler=sampler, **more)


def values(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


def after(loader: Any, batches: int) -> Any:
    """The state of a loader after so many batches of an epoch."""
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    return through_json(loader.state_dict())


def going_on(iterator: Iterator[Any], times: int, error: type[Exception]) -> int:
    """Ask so many times; returns how often it raised."""
    raised = 0
    for _ in range(times):
        try:
            next(iterator)
        except error:
            raised += 1
    return raised


class RaisesOnce:
    """A sampler whose iterator raises when it comes to ``at``, and goes on after that, or after so many times."""

    def __init__(self, at: int, times: int = 1) -> None:
        self.at = at
        self.times = times

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Any:
        return _RaisesOnce(self.at, self.times)


class _RaisesOnce:
    def __init__(self, bad: int, times: int) -> None:
        self.next, self.bad, self.times = 0, bad, times

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        if self.next == self.bad and self.times:
            self.times -= 1
            raise OSError("the index server is away")
        if self.next == 40:
            raise StopIteration
        self.next += 1
        return self.next - 1
