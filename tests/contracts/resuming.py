"""What the tests of save and resume share."""

from __future__ import annotations

import json
from typing import Any

import torch

from minato_gpu import DataLoader

DATA: Any = list(range(40))


def generator(seed: int = 17) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def through_json(state: Any) -> Any:
    """The state as another process would read it from a file."""
    return json.loads(json.dumps(state))


def saves_along(loader: Any, stride: int = 1) -> list[tuple[list[Any], Any]]:
    """One epoch of the loader, saved after every so many batches: the batches until then, and the state.

    One loader for all, whose workers are forked once.
    """
    iterator = iter(loader)
    got: list[Any] = []
    found: list[tuple[list[Any], Any]] = [([], through_json(loader.state_dict()))]
    for batch in iterator:
        got.append(batch)
        if len(got) % stride == 0:
            found.append((list(got), through_json(loader.state_dict())))
    return found


def loader_of(sampler: Any = None, **more: Any) -> Any:
    return DataLoader(DATA, 4, sampler=sampler, **more)


def after(loader: Any, batches: int) -> Any:
    """The state of a loader after so many batches of an epoch."""
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    return through_json(loader.state_dict())
