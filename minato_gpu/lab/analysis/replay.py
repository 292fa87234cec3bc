"""Recorded batches, given again and again: the step costs what it does with a batch that is there already."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from minato_gpu.device.collated import mapped
from minato_gpu.samples import Value

_MOST = 4


class Replay:
    """Fresh copies of a few batches in turn, so that a step that changes its batch in place finds it as it was.

    A few, because batches may differ in size. What cannot be copied is given as it is.
    """

    def __init__(self) -> None:
        self._batches: list[Value] = []
        self._on_device: list[Value] = []
        self._pinned = self.was_on_device = False
        self._number = 0

    def record(self, batch: Value) -> None:
        """Keep a copy of this batch, if there is room: before anybody changes it."""
        if len(self._batches) == _MOST:
            return
        if not self._batches:
            self._pinned = torch.cuda.is_available() and _any(batch, lambda tensor: tensor.is_pinned())
            self.was_on_device = _any(batch, lambda tensor: tensor.device.type != "cpu")
        self._batches.append(_copied(batch))

    def __len__(self) -> int:
        return len(self._batches)

    def fresh(self) -> Value:
        """The next batch as the loader gave it: in pinned memory where it was."""
        batch = _copied(self._batches[self._next()])
        return mapped(batch, lambda tensor: tensor.pin_memory()) if self._pinned else batch

    def on_device(self) -> Value:
        """The next batch where the step will want it, so that nothing is transferred."""
        number = self._next()
        if not self._on_device:
            self._on_device = [mapped(batch, lambda tensor: tensor.to(device())) for batch in self._batches]
        return _copied(self._on_device[number])

    def _next(self) -> int:
        self._number += 1
        return self._number % len(self._batches)


def device() -> torch.device | None:
    """The device that this process computes on; None: the CPU."""
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.device("cuda", torch.cuda.current_device()) if used else None


def wait_for_device() -> None:
    """Until what has been given to the device is done."""
    where = device()
    if where is not None:
        torch.cuda.synchronize(where)


def _copied(batch: Value) -> Value:
    try:
        return copy.deepcopy(batch)
    except Exception:
        return batch


def _any(batch: Value, test: Callable[[torch.Tensor], bool]) -> bool:
    found: list[bool] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        found.append(test(tensor))
        return tensor

    mapped(batch, look)
    return any(found)
