"""What a fake device is made of: streams of work, events among it, memory that shows who wrote it last."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from tests.fake_device import FakeDevice

CANARY = 0xEE


class FakeStream:
    """Work in its order: functions, and events to wait for. ``done`` counts what has run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.work: deque[Any] = deque()
        self.issued = self.done = 0


class FakeEvent:
    """After the first ``number`` pieces of work of a stream."""

    def __init__(self, device: FakeDevice, stream: FakeStream) -> None:
        self._device = device
        self.stream = stream
        self.number = stream.issued

    @property
    def passed(self) -> bool:
        """Whether the stream has come to it."""
        return self.stream.done >= self.number

    def query(self) -> bool:
        """See Event."""
        with self._device.lock:
            return self.passed

    def synchronize(self) -> None:
        """See Event."""
        self._device.run_to(self)


class Copy:
    """The work of copying one tensor into another."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.target = target
        self.source = source

    def __call__(self) -> None:
        self.target.copy_(self.source)


class Block:
    """Memory that is never returned to the host's allocator, so that a late write destroys no innocent's bytes."""

    def __init__(self, nbytes: int, home: FakeStream, device: FakeDevice) -> None:
        self.device = device
        self.memory = np.full(nbytes, CANARY, np.uint8)
        self.all = torch.from_numpy(self.memory)
        self.home = home
        self.users: set[FakeStream] = set()
        self.guards: list[FakeEvent] = []
