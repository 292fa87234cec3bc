"""Where the system gives no descriptors of processes (Linux before 5.3, sandboxes), pipes tell of a death."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from typing import Any

import pytest
import torch

from minato_gpu import DataLoader
from minato_gpu.lanes.processes import WorkerDied
from tests.contracts.datasets import Made, Sourced, rows
from tests.contracts.deadly import SAMPLES, Deadly, deadly_loader
from tests.support.raising import error_of

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(params=["EPERM", "ENOSYS", "missing"], autouse=True)
def no_pidfd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by a sandbox, not there, or unknown to this Python."""
    if request.param == "missing":
        monkeypatch.delattr(os, "pidfd_open")
        return
    number = getattr(errno, request.param)

    def refused(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", refused)


@pytest.mark.parametrize("kind", ["process", "thread"])
@pytest.mark.parametrize("persistent", [False, True])
def test_epochs(kind: str, persistent: bool) -> None:
    loader: Any = DataLoader(
        Sourced(20, torch.tensor), 4, num_workers=2, worker_kind=kind, persistent_workers=persistent, cache="1MB"
    )
    for _ in range(2):
        assert [int(key) for batch in loader for key in batch] == list(range(20))
    assert loader.stats()["reads"]["process"] == "runs"


def test_an_epoch_that_is_left() -> None:
    """With workers at work, which leave something behind that holds all they held."""

    def make(key: int) -> Any:
        if key > 4:
            if not os.fork():
                signal.alarm(60)
                signal.pause()
            signal.pause()
        return torch.tensor(key)

    iterator = iter(DataLoader(Made(20, make), 2, num_workers=2))
    assert next(iterator).tolist() == [0, 1]
    del iterator


def test_a_death_is_noticed() -> None:
    loader = deadly_loader(Deadly(17, 1), on_worker_death="raise")
    assert "is killed by signal: Killed" in str(error_of(WorkerDied, rows, loader))


def test_replacing_says_what_it_needs() -> None:
    caught = error_of(RuntimeError, iter, deadly_loader(Deadly(17, 1)))
    assert str(caught).startswith("on_worker_death='replace' needs pidfd_open")
    assert "multiprocessing_context='spawn'" in str(caught)


def test_replacing_without_a_fork() -> None:
    spawn = multiprocessing.get_context("spawn")
    loader = deadly_loader(Deadly(17, 1, context=spawn), multiprocessing_context=spawn)
    assert sorted(row[0] for row in rows(loader)) == list(range(SAMPLES))
    assert loader.stats()["workers"] == {"died": 1, "hung": 0, "replaced": 1}
