"""What a fake device is made of: streams of work, events among it, memory that shows who wrote it last."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from tests.support.fake_device import FakeDevice

CANARY = 0xEE


class FakeStream:
    """Work in its order: functions, and events to wait for. ``done`` counts what has run."""

    def __init__(self, name: str, device: FakeDevice) -> None:
        self.name = name
        self.device = device
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
            self._device.tell_late_error()
            return self.passed

    def synchronize(self) -> None:
        """See Event."""
        if not self.passed:
            self._device.waits("an event")
        self._device.run_to(self)
        self._device.tell_late_error()


class Copy:
    """The work of copying tensors into others, in two halves: work of other streams may come between them. Called until
    it is done, which it tells."""

    def __init__(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        self.targets = [target.reshape(-1) if target.is_contiguous() else target for target in targets]
        self.sources = [source.reshape(target.shape) for source, target in zip(sources, self.targets, strict=True)]
        self._begun = False

    def __call__(self) -> bool:
        for target, source in zip(self.targets, self.sources, strict=True):
            half = target.shape[0] // 2 if target.dim() else 0
            part = slice(half, None) if self._begun else slice(0, half)
            if target.dim():
                target[part].copy_(source[part])
            elif self._begun:
                target.copy_(source)
        done, self._begun = self._begun, True
        return done

    def reads(self, begin: int, end: int) -> bool:
        """Whether it has yet to read anything of these addresses."""
        return any(begin <= source.data_ptr() < end for source in self.sources)


class Block:
    """Memory that is never returned to the host's allocator, so that a late write destroys no innocent's bytes."""

    def __init__(self, nbytes: int, home: FakeStream, device: FakeDevice, *, foreign: bool = False) -> None:
        self.device, self.foreign = device, foreign
        self.memory = np.full(nbytes, CANARY, np.uint8)
        self.all = torch.from_numpy(self.memory)
        self.home = home
        self.users: set[FakeStream] = set()
        self.guards: list[FakeEvent] = []


class Foreign:
    """What another library (CuPy, DALI) has made, in memory of its own: PyTorch borrows it, and copies nothing.

    Once the last tensor on it has died, its library uses the memory again, at once and on streams that nobody knows;
    ``blocks``: and waits for the whole device first, in whichever thread dropped that tensor. Made on the device that
    is the calling thread's current one, whatever stream is.
    """

    def __init__(self, device: FakeDevice, value: Any, *, blocks: bool = False) -> None:
        array = np.ascontiguousarray(value)
        self.device = device.everyone[device.current_device]
        self.dtype, self.shape, self.blocks = array.dtype, array.shape, blocks
        self.block = Block(array.nbytes, self.device.current, self.device, foreign=True)
        self.block.memory[:] = array.reshape(-1).view(np.uint8)

    def let_go(self) -> None:
        """Nobody holds it any more."""
        if self.blocks:
            self.device.waits("a deleter")
        self.block.memory[:] = CANARY
