"""What is pinned covers what is used, in few pieces, stays where it is, and is given back."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
import torch

from minato_gpu.memory import arena as arenas
from minato_gpu.memory import host
from minato_gpu.memory.accelerator import Accelerator
from minato_gpu.memory.arena import Arena
from minato_gpu.memory.host import Host
from minato_gpu.memory.loans import Loans
from tests.support.fake_device import FakeDevice

STEP = 1 << 16


def test_pieces_grow_and_meet() -> None:
    device, arena = FakeDevice(), Arena("tests", 1 << 24)
    pinned = Host(arena, Loans(), device, STEP)
    for end in (10, STEP, STEP + 1, 5 * STEP, 6 * STEP, 1 << 22):
        pinned.cover(end)
        assert pinned.pinned >= end
    assert len(pinned.ends) <= 6 and pinned.ends == sorted(pinned.ends)
    begins = sorted(device.pinned)
    assert [begin + device.pinned[begin] for begin in begins[:-1]] == begins[1:]
    pinned.close()
    pinned.close()
    assert device.pinned == {}
    arena.close()


def test_no_more_is_pinned_ahead_of_need_than_batches_can_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_MOST", 2 * STEP)
    device, arena = FakeDevice(), Arena("tests", 1 << 24)
    pinned = Host(arena, Loans(), device, STEP)
    for end in (STEP, 2 * STEP, 3 * STEP, 5 * STEP, 20 * STEP, 21 * STEP):
        pinned.cover(end)
    assert [end // STEP for end in pinned.ends] == [1, 2, 4, 6, 20, 22]
    pinned.close()
    arena.close()


class _Refusing(FakeDevice):
    def pin(self, address: int, nbytes: int) -> None:
        raise RuntimeError("not on this machine")


def test_a_device_that_refuses_is_asked_once() -> None:
    arena = Arena("tests", 1 << 24)
    pinned = Host(arena, Loans(), _Refusing(), STEP)
    pinned.cover(1)
    assert (pinned.pinned, pinned.refused) == (0, "not on this machine")
    pinned.cover(2)
    pinned.close()
    arena.close()


def test_only_what_is_pinned_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a free extent goes back to the kernel, and so does all of it where the device has refused."""
    monkeypatch.setattr(arenas, "_KEEP_FREE", 0)
    monkeypatch.setattr(arenas, "_LATELY", 1)
    for device, kept in ((FakeDevice(), STEP), (_Refusing(), 0)):
        arena = Arena("tests", 1 << 24)
        pinned = Host(arena, Loans(), device, STEP)
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
    pinned = Host(arena, Loans(), FakeDevice(), STEP)
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
    pinned = Host(arena, Loans(), device)
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


def test_how_much_is_pinned_may_be_asked_for_while_it_is_unpinned() -> None:
    """``stats()`` is called by whichever thread."""
    arena = Arena("tests", 1 << 20)
    pinned = Host(arena, Loans(), FakeDevice(), step=STEP)
    pinned.cover(1)

    class Closing(list[int]):
        def __len__(self) -> int:
            pinned.ends = []
            return super().__len__()

    pinned.ends = Closing(pinned.ends)
    assert pinned.pinned in (0, STEP)
    arena.close()
