"""Workers that come and go while an epoch runs: what is delivered is the same."""

from __future__ import annotations

import random

import pytest

from minato_gpu.engine import builder
from tests.contracts.checks import NOTHING, differences
from tests.contracts.datasets import Costly
from tests.contracts.modes import MINATO, Mode

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
    monkeypatch.setattr(builder, "WorkerCount", Restless)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_all_comes_while_they_come_and_go(mode: Mode, persistent: bool) -> None:
    loader = mode.loader(Costly(120), 4, num_workers=1, persistent_workers=persistent, max_workers=_MOST)
    at_work = set()
    for stop in (3, 30, 30):
        received = []
        for number, batch in enumerate(loader):
            received += batch.tolist()
            at_work.add(loader.stats()["workers"]["at_work"])
            if number == stop:
                break
        assert len(received) == 4 * (stop + 1) or differences(range(120), received) == NOTHING
    assert at_work == set(range(1, _MOST + 1))
