"""Workers that die or take too long: a RuntimeError, never a hang."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.leaks import child_pids
from tests.raising import error_of
from tests.torch_semantics.datasets import Made, Numbers, as_lists, numbers_in
from tests.waiting import wait_until

_FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def _swept() -> Iterator[None]:
    """What PyTorch's own worker was sharing when it died is nobody's: a test beside this one would find it."""
    yield
    for entry in Path("/dev/shm").glob("torch_*_*"):
        pid = entry.name.split("_")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            entry.unlink(missing_ok=True)


_DEATHS: dict[str, Callable[[], Any]] = {
    "_exit": lambda: os._exit(3),
    "_exit(0)": lambda: os._exit(0),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "segmentation fault": lambda: ctypes.string_at(0),
}


def _dies_at(bad: int, how: str) -> Made:
    def make(index: int) -> Any:
        if index == bad:
            _DEATHS[how]()
        return torch.tensor(index)

    return Made(12, make)


@pytest.mark.parametrize(("how", "bad"), [*((how, 7) for how in _DEATHS), ("_exit", 0), ("SIGKILL", 0)])
def test_a_dying_worker(loader_class: Any, how: str, bad: int) -> None:
    caught = error_of(RuntimeError, list, loader_class(_dies_at(bad, how), 2, num_workers=2))
    assert re.match(r"DataLoader worker \(pid(\(s\))? [\d, ]+\)", str(caught)), str(caught)


def test_a_worker_killed_from_outside(loader_class: Any) -> None:
    pid = _FORK.Value("i", 0)

    def make(index: int) -> Any:
        if index == 5:
            pid.value = os.getpid()
            signal.pause()
        return torch.tensor(index)

    iterator = iter(loader_class(Made(12, make), 2, num_workers=2))
    assert next(iterator).tolist() == [0, 1]
    assert wait_until(lambda: pid.value != 0)
    os.kill(pid.value, signal.SIGKILL)
    text = str(error_of(RuntimeError, lambda: list(iterator)))
    assert text.startswith("DataLoader worker (pid") and str(pid.value) in text


def test_a_new_epoch_after_a_death(loader_class: Any) -> None:
    alive = _FORK.Value("i", 1)

    def make(index: int) -> Any:
        if index == 3 and alive.value:
            os._exit(1)
        return torch.tensor(index)

    loader = loader_class(Made(8, make), 2, num_workers=2)
    error_of(RuntimeError, list, loader)
    alive.value = 0
    assert numbers_in(loader) == list(range(8))


def test_a_dying_start_function(loader_class: Any) -> None:
    loader = loader_class(Numbers(4), num_workers=1, worker_init_fn=lambda worker: os._exit(1))
    assert str(error_of(RuntimeError, list, loader)).startswith("DataLoader worker (pid")


def test_all_other_workers_end_too(loader_class: Any) -> None:
    error_of(RuntimeError, list, loader_class(_dies_at(3, "_exit"), 2, num_workers=3))
    assert wait_until(lambda: not child_pids())


def test_timeout(loader_class: Any) -> None:
    gate = _FORK.Event()

    def make(index: int) -> Any:
        if index == 2:
            gate.wait()
        return torch.tensor(index)

    iterator = iter(loader_class(Made(4, make), 2, num_workers=1, timeout=1.5))
    assert next(iterator).tolist() == [0, 1]
    assert str(error_of(RuntimeError, next, iterator)).startswith("DataLoader timed out after 1.5 seconds")
    gate.set()


def test_timeout_in_the_start_function(loader_class: Any) -> None:
    gate = _FORK.Event()
    loader = loader_class(Numbers(4), num_workers=1, timeout=1.5, worker_init_fn=lambda worker: gate.wait())
    iterator = iter(loader)
    assert str(error_of(RuntimeError, next, iterator)).startswith("DataLoader timed out after 1.5 seconds")
    gate.set()


def test_timeout_that_is_not_reached(loader_class: Any) -> None:
    for _ in range(2):
        assert as_lists(loader_class(Numbers(4), 2, num_workers=2, timeout=50)) == [[0, 1], [2, 3]]


def test_timeout_needs_workers(loader_class: Any) -> None:
    loader = loader_class(Numbers(4), timeout=1)
    with pytest.raises(AssertionError, match="timeout == 0"):
        iter(loader)
