"""A training loop that draws from torch's global generator, for ``test_resume_global_orders``; also as a process.

Argument: more of the loader's arguments, as JSON. Input: the seed (null: none is set), the state to go on from (null:
none), where to stop, and how many batches have been read ahead by then. Output: what ``trained`` returns.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import numpy as np
import torch

from minato_gpu import DataLoader
from tests.contracts.datasets import Made, draw

EPOCHS, SAMPLES, SIZE = 4, 20, 4


def make(*, draws: bool = True, **more: Any) -> Any:
    """A loader that is given no generator; with threads its data set must not draw from global generators."""
    sample = draw if draws and more.get("worker_kind") != "thread" else _plain
    return DataLoader(Made(SAMPLES, sample), SIZE, collate_fn=list, **{"shuffle": True, **more})


def _plain(index: int) -> list[Any]:
    return [index]


def seed(number: int) -> None:
    """Of all global generators."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def trained(loader: Any, state: Any = None, stop: Any = None, ahead: int = 0) -> tuple[list[Any], Any]:
    """What training gets: epoch, batch and what it draws for it; and the loader's state.

    ``stop``: (epoch, batches of it that were delivered), or (epoch, "end") when the iterator has said so.
    """
    got: list[Any] = []
    first, at = 0, 0
    if state is not None:
        loader.load_state_dict(state)
        first, at = state["epoch"], state.get("progress", {}).get("batches", 0)
    for epoch in range(first, EPOCHS):
        iterator = iter(loader)
        while True:
            if stop == [epoch, at]:
                return got[: len(got) - ahead], loader.state_dict(ahead=ahead)
            batch = next(iterator, None)
            if batch is None:
                break
            at += 1
            got.append([epoch, [list(map(float, row)) for row in batch], torch.rand(()).item()])
        if stop == [epoch, "end"]:
            return got, loader.state_dict()
        at = 0
    return got, None


if __name__ == "__main__":
    number, given, where, read_ahead = json.loads(sys.stdin.read())
    if number is not None:
        seed(number)
    sys.stdout.write(json.dumps(trained(make(**json.loads(sys.argv[1])), given, where, read_ahead)))
