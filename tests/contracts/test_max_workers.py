"""Workers that come and go while an epoch runs: what is delivered is the same."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import pytest
import torch

from minato_gpu import DataLoader
from minato_gpu.engine import building
from tests.contracts.checks import NOTHING, differences
from tests.contracts.datasets import Costly, Made
from tests.contracts.modes import MINATO, Mode
from tests.support.waiting import wait_until

_MOST = 4


class Restless:
    """Another number with every batch."""

    def __init__(self, least: int, most: int) -> None:
        self.workers = self.least = least
        self.most = most
        self._random = random.Random(7)

    def begin(self, now: float) -> None:
        """An epoch begins."""

    def waited(self, cause: str, seconds: float) -> None:
        """The consumer has waited."""

    def delivered(self, now: float, samples: int, idle: int) -> bool:
        """A batch was delivered."""
        before, self.workers = self.workers, self._random.randint(self.least, self.most)
        return self.workers != before


@pytest.fixture(autouse=True)
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "WorkerCount", Restless)


def _noise(index: int) -> torch.Tensor:
    return torch.tensor([float(index), float(torch.rand(()))])


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_content_is_the_same(mode: Mode, persistent: bool) -> None:
    def delivered(**more: Any) -> list[list[Any]]:
        torch.manual_seed(3)
        made = mode.loader(Made(120, _noise), 4, num_workers=1, persistent_workers=persistent, **more)
        return [sorted(row.tolist() for batch in made for row in batch) for _ in range(3)]

    epochs = delivered(max_workers=_MOST)
    assert differences([float(index) for index in range(120)], [row[0] for row in epochs[0]]) == NOTHING
    if mode.processes:
        assert epochs == delivered()


def test_stats_tell_how_many_are_at_work() -> None:
    loader: Any = DataLoader(Made(200, float), 4, num_workers=1, max_workers=_MOST)
    seen = set()
    for _ in loader:
        seen.add(loader.stats()["workers"]["at_work"])
    assert seen == set(range(1, _MOST + 1))


def test_an_epoch_that_is_left_early() -> None:
    loader: Any = DataLoader(Made(200, float), 4, num_workers=1, max_workers=_MOST, persistent_workers=True)
    for stop in (1, 3, 7):
        for number, _ in enumerate(loader):
            if number == stop:
                break
    assert differences([float(index) for index in range(200)], [float(x) for batch in loader for x in batch]) == NOTHING


@pytest.mark.parametrize("worker", [0, _MOST - 1])
def test_any_of_them_may_be_killed(worker: int) -> None:
    """Also one that rests."""
    loader: Any = DataLoader(
        Costly(120), 4, num_workers=1, max_workers=_MOST, on_worker_death="replace", persistent_workers=True
    )
    killed = -1
    for _ in range(2):
        received = []
        for number, batch in enumerate(loader):
            if number == 3:
                lane = loader._session.engine.pump.lanes["cpu"]
                assert wait_until(lambda: lane.pids[worker] != killed), "it has been replaced"  # noqa: B023
                killed = lane.pids[worker]
                os.kill(killed, signal.SIGKILL)
            received += batch.tolist()
        assert differences(range(120), received) == NOTHING
