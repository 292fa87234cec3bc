"""Workers that die or take too long: a RuntimeError, never a hang.

A worker dies when the iterator has been made and all that the worker has sent has been received. What PyTorch's own
loader makes of another moment depends on what was under way (another error comes first, a thread or a socket stays);
``tests.contracts.test_deaths`` has minato_gpu's workers die at any.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.contracts.datasets import Made
from tests.support.leaks import no_child_stays
from tests.support.raising import error_of
from tests.support.waiting import wait_until
from tests.torch_semantics.datasets import Numbers, as_lists, numbers_in

_FORK = multiprocessing.get_context("fork")


_DEATHS: dict[str, Callable[[], Any]] = {
    "_exit": lambda: os._exit(3),
    "_exit(0)": lambda: os._exit(0),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGUSR1": lambda: os.kill(os.getpid(), signal.SIGUSR1),
    "segmentation fault": lambda: ctypes.string_at(0),
}


class _Dying(Made):
    """The worker that is to prepare sample ``bad`` dies of it, once the batches of two before it have been received."""

    def __init__(self, bad: int, how: str) -> None:
        super().__init__(12, self._make)
        self._bad, self._how = bad, how
        self._steps = _FORK.Semaphore(0)
        self.deadly = _FORK.Value("i", 1)

    def _make(self, index: int) -> Any:
        if index == self._bad and self.deadly.value:
            for _ in range(1 + self._bad // 2):
                self._steps.acquire()
            _DEATHS[self._how]()
        return torch.tensor(index)

    def consume(self, loader: Any) -> None:
        """Receive what comes before the death, and the error."""
        iterator = iter(loader)
        self._steps.release()
        for _ in iterator:
            self._steps.release()


@pytest.mark.parametrize(("how", "bad"), [*((how, 7) for how in _DEATHS), ("_exit", 0), ("SIGKILL", 0)])
def test_a_dying_worker(loader_class: Any, how: str, bad: int) -> None:
    data = _Dying(bad, how)
    caught = error_of(RuntimeError, data.consume, loader_class(data, 2, num_workers=2))
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
    data = _Dying(3, "_exit")
    loader = loader_class(data, 2, num_workers=2)
    error_of(RuntimeError, data.consume, loader)
    data.deadly.value = 0
    assert numbers_in(loader) == list(range(12))


def test_a_dying_start_function(loader_class: Any) -> None:
    made = _FORK.Semaphore(0)

    def begin(worker: int) -> None:
        made.acquire()
        os._exit(1)

    iterator = iter(loader_class(Numbers(4), num_workers=1, worker_init_fn=begin))
    made.release()
    assert str(error_of(RuntimeError, next, iterator)).startswith("DataLoader worker (pid")


def test_all_other_workers_end_too(loader_class: Any) -> None:
    data = _Dying(3, "_exit")
    with no_child_stays():
        error_of(RuntimeError, data.consume, loader_class(data, 2, num_workers=3))


def test_timeout(loader_class: Any, is_minato: bool) -> None:
    gate, waits = _FORK.Event(), _FORK.Event()

    def make(index: int) -> Any:
        if index == 2:
            waits.set()
            gate.wait()
        return torch.tensor(index)

    iterator = iter(loader_class(Made(4, make), 2, num_workers=1, timeout=1.5))
    assert waits.wait(20)  # then the first batch is there when it is asked for: PyTorch's worker has a thread send it
    assert is_minato or wait_until(lambda: not iterator._data_queue.empty())
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
