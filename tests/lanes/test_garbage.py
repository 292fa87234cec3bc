"""What a process has dropped and not collected yet is not finalised by the workers that it forks."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import pytest

from minato_gpu import DataLoader
from tests.support.numbers import LENGTH

_FORK: Any = multiprocessing.get_context("fork")
_COLLECTS_SOON: list[Any] = []  # not empty: a process that was just forked would collect now, if ever


def _after_fork() -> None:
    if _COLLECTS_SOON:
        gc.set_threshold(10)
        _COLLECTS_SOON.extend([] for _ in range(1000))


os.register_at_fork(after_in_child=_after_fork)


class Dropped:
    """A cycle that says where it is finalised."""

    def __init__(self, elsewhere: Any) -> None:
        self.me, self._pid, self._elsewhere = self, os.getpid(), elsewhere

    def __del__(self) -> None:
        if os.getpid() != self._pid:
            self._elsewhere.value += 1


@pytest.fixture
def threshold() -> Iterator[None]:
    """The garbage of a test is still there when it forks."""
    before = gc.get_threshold()
    gc.set_threshold(10_000_000)
    _COLLECTS_SOON.append(None)
    yield
    _COLLECTS_SOON.clear()
    gc.set_threshold(*before)
    gc.enable()


class Collects:
    """Whether the process that prepares a sample collects garbage."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, key: int) -> int:
        return int(gc.isenabled())


@pytest.mark.usefixtures("threshold")
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("on_worker_death", ["raise", "replace"])
def test_garbage_is_left_to_the_process_that_made_it(on_worker_death: str, enabled: bool) -> None:
    elsewhere = _FORK.Value("i", 0, lock=False)
    if not enabled:
        gc.disable()
    Dropped(elsewhere)
    dataset: Any = Collects()
    loader = DataLoader(dataset, 4, num_workers=2, multiprocessing_context="fork", on_worker_death=on_worker_death)
    found = {int(each) for batch in loader for each in batch}
    assert elsewhere.value == 0
    assert found == {int(enabled)}, "workers collect their own garbage as their parent does"
    assert gc.isenabled() == enabled
