"""A program that the tests of ``test_ends`` start and end in rude ways.

Arguments: the scenario, and the mode's name. It prints the ids of its workers on one line when they are at work.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tests.contracts.datasets import Made, Sourced
from tests.contracts.modes import EVERY, Mode
from tests.support.leaks import child_pids
from tests.support.waiting import wait_until


def _sleepy(index: int) -> Any:
    """Every worker ends up in a sleep that outlasts any test."""
    if index >= 8:
        time.sleep(3600)
    return torch.tensor(index)


def _endless_loop(mode: Mode) -> None:
    """Takes batch after batch of an epoch that outlasts any test; the parent is killed or interrupted meanwhile."""
    iterator = iter(mode.loader(Made(1_000_000_000, torch.tensor), 2, num_workers=2))
    _announce(next(iterator))
    for batch in iterator:
        assert len(batch) == 2


def _waiting(mode: Mode) -> None:
    """Waits for a batch that never comes, with the workers asleep in the data set, and a process that reads ahead."""
    iterator = iter(mode.loader(Sourced(40, _sleepy), 2, num_workers=2))
    _announce(next(iterator))
    while True:
        next(iterator)


def _idle(mode: Mode) -> None:
    """Persistent workers, and the process that reads ahead, wait for work while the program does something else."""
    loader = mode.loader(Sourced(8, torch.tensor), 2, num_workers=2, persistent_workers=True)
    _announce(list(loader))
    while True:
        time.sleep(3600)


def _forks(mode: Mode) -> None:
    """Has forked a process of its own, which goes on when the program has ended."""
    global _kept
    loader = mode.loader(Made(1000, torch.tensor), 2, num_workers=2, on_worker_death="replace")
    with ThreadPoolExecutor(1) as pool:  # the kernel would end workers that the main thread has forked
        _kept = [iterator := pool.submit(iter, loader).result()]
    _announce(next(iterator))
    pid = os.fork()
    if pid:
        _say(str(pid))
    while True:
        signal.pause()


def _exits(mode: Mode) -> None:
    """Leaves through sys.exit while persistent workers and an unfinished iterator live in globals."""
    global _kept
    loader = mode.loader(Made(1000, torch.tensor), 2, num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    _kept = [loader, iterator, next(iterator)]
    _announce(_kept)
    sys.exit(3)


def _exits_as_a_child(mode: Mode) -> None:
    """A process that multiprocessing has started ends in the same way: that waits for its children."""
    child = multiprocessing.get_context("fork").Process(target=_exits, args=(mode,))
    child.start()
    child.join()
    sys.exit(child.exitcode)


def _saves(mode: Mode, **more: Any) -> None:
    """Is asked to end, as a scheduler does it, and goes on until the step that it is at has been saved."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    loader = mode.loader(Sourced(40, torch.tensor), 2, num_workers=2, **more)
    iterator = iter(loader)
    head = next(iterator)
    _announce(head)
    assert wait_until(lambda: asked)
    assert sorted(int(key) for batch in (head, *iterator) for key in batch) == [*range(40)]
    assert loader.stats()["workers"]["died"] == 0
    assert loader.stats()["reads"]["process"] == "runs"
    _say("saved")


def _saves_replacing(mode: Mode) -> None:
    """The two processes that start replacements stay as well."""
    _saves(mode, on_worker_death="replace")


def _announce(_: Any) -> None:
    """Tell the test which workers there are; the argument only says what has been done before."""
    _say(" ".join(map(str, child_pids())))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


_kept: list[Any] = []
SCENARIOS = {
    f.__name__.strip("_"): f
    for f in (_endless_loop, _waiting, _idle, _forks, _exits, _exits_as_a_child, _saves, _saves_replacing)
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]]({mode.name: mode for mode in EVERY}[sys.argv[2]])
