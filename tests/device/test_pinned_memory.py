"""PinnedArena memory: what is pinned covers what is used and is given back."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
import torch

from minato_gpu.device.accelerator import Accelerator
from minato_gpu.device.pinned_memory import PinnedArena
from minato_gpu.memory import arena as arenas
from minato_gpu.memory.arena import Arena
from minato_gpu.memory.loans import Loans
from tests.support.fake_device import FakeDevice

STEP = 1 << 16


class _Refusing(FakeDevice):
    def pin(self, address: int, nbytes: int) -> None:
        raise RuntimeError("not on this machine")


def test_only_what_is_pinned_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a free extent goes back to the kernel, and so does all of it where the device has refused."""
    monkeypatch.setattr(arenas, "_KEEP_FREE", 0)
    monkeypatch.setattr(arenas, "_LATELY", 1)
    for device, kept in ((FakeDevice(), STEP), (_Refusing(), 0)):
        arena = Arena("tests", 1 << 24)
        pinned = PinnedArena(arena, Loans(), device, STEP)
        pinned.cover(1)
        for size in (4 * STEP, *[mmap.PAGESIZE] * 8):
            offset = arena.allocate(size)
            np.frombuffer(arena.buffer, np.uint8, size, offset)[:] = 7
            arena.free(offset)
        assert os.fstat(arena.fd).st_blocks * 512 <= kept + mmap.PAGESIZE
        pinned.close()
        arena.close()


def test_pinned_pages_are_never_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device would go on reading them after the next write went to others."""
    monkeypatch.setattr(arenas, "_KEEP_FREE", 0)
    monkeypatch.setattr(arenas, "_LATELY", 2)
    arena = Arena("tests", 1 << 24)
    pinned = PinnedArena(arena, Loans(), FakeDevice(), STEP)
    pinned.cover(4 * STEP)
    for size in (4 * STEP, *[mmap.PAGESIZE] * 8):
        offset = arena.allocate(size)
        np.frombuffer(arena.buffer, np.uint8, size, offset)[:] = 7
        arena.free(offset)
    assert (np.frombuffer(arena.buffer, np.uint8, 4 * STEP, 0) == 7).all()
    pinned.close()
    arena.close()


@pytest.mark.gpu
def test_a_real_device_reads_what_is_written_after_pinning() -> None:
    device, arena = Accelerator(torch.device("cuda")), Arena("tests", 1 << 26)
    pinned = PinnedArena(arena, Loans(), device)
    pinned.cover(1 << 24)
    assert pinned.refused is None and pinned.pinned >= 1 << 24
    host = np.frombuffer(arena.buffer, np.uint8, 1 << 24, 0)
    for value in (3, 5):
        host[:] = value
        with device.running(device.stream()):
            target = device.empty(host.nbytes)
            device.copy(target, torch.from_numpy(host))
            device.event().synchronize()
        assert bool((target == value).all())
    pinned.close()
    del host
    arena.close()
