"""Samples that kill their worker, and what a loader that replaces workers delivers all the same."""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.reduction
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset

from tests.contracts.datasets import draw, rows
from tests.contracts.modes import IN_ORDER, Mode

FORK = multiprocessing.get_context("fork")
SAMPLES = 60

DEATHS: dict[str, Callable[[], Any]] = {
    "_exit": lambda: os._exit(3),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGUSR1": lambda: os.kill(os.getpid(), signal.SIGUSR1),
    "segmentation fault": lambda: ctypes.string_at(0),
    "no memory behind shared memory": lambda: os.kill(os.getpid(), signal.SIGBUS),
}


class Deadly(Dataset[Any]):
    """The sample of key ``at`` kills its worker the first ``times`` times, by ``how``; samples are ``draw(key)``."""

    def __init__(self, at: int, times: int, how: str = "SIGKILL", context: Any = FORK) -> None:
        self.at = at
        self.how = how
        self.left = context.Value("i", times, lock=False)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, key: int) -> Any:
        if key == self.at and self.left.value:
            self.left.value -= 1
            DEATHS[self.how]()
        assert sum(range(2000)) > 0
        return draw(key)


def deadly_loader(dataset: Any, mode: Mode = IN_ORDER, **more: Any) -> Any:
    """Two workers, which are replaced; batches of 4, in an order that is drawn."""
    arguments: dict[str, Any] = {"num_workers": 2, "on_worker_death": "replace", **more}
    seed = torch.Generator().manual_seed(5)
    return mode.loader(dataset, 4, generator=seed, shuffle=True, **arguments)


def undisturbed(mode: Mode = IN_ORDER) -> list[Any]:
    """What is delivered where nobody dies."""
    return rows(deadly_loader(Deadly(-1, 0), mode))


def check_all(received: list[Any], mode: Mode = IN_ORDER) -> None:
    """Every sample once, with the draws that it has in a run in which nobody dies; in order where that is strict."""
    expected = undisturbed(mode)
    if mode.lateness:
        received, expected = sorted(received), sorted(expected)
    assert received == expected
