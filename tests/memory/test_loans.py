"""Loans: memory comes back when the last thing that refers to it dies, and not before."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu.memory import blobs
from minato_gpu.memory.arena import Arena
from minato_gpu.memory.layout import Layout
from minato_gpu.memory.loans import Loans

_VIEWS: dict[str, Callable[[Any], Any]] = {
    "the array": lambda owner: owner,
    "a slice of a slice": lambda owner: owner[8:][:16],
    "another dtype": lambda owner: owner.view(np.float32).reshape(2, -1),
    "a tensor": torch.from_numpy,
    "a view of a tensor": lambda owner: torch.from_numpy(owner).view(torch.int64)[1:].view(1, -1),
    "a transposed view": lambda owner: torch.from_numpy(owner).view(8, 8).t()[2],
    "a row that iteration gave": lambda owner: list(torch.from_numpy(owner).view(8, 8))[3],
    "numpy of a tensor": lambda owner: torch.from_numpy(owner)[4:].numpy(),
    "a tensor of numpy of a tensor": lambda owner: torch.from_numpy(torch.from_numpy(owner)[4:].numpy()),
    "detached": lambda owner: torch.from_numpy(owner).view(torch.float32).requires_grad_().detach(),
    "a storage": lambda owner: torch.from_numpy(owner).untyped_storage(),
    "a memoryview": lambda owner: memoryview(owner)[3:],
    "DLPack": lambda owner: np.from_dlpack(torch.from_numpy(owner)),
    "memoryview of numpy of a view": lambda owner: torch.from_numpy(owner)[:9].numpy().data[1:],
}


@pytest.mark.parametrize("view", _VIEWS.values(), ids=_VIEWS.keys())
def test_the_last_view_returns_the_block(view: Callable[[Any], Any]) -> None:
    arena, loans = Arena("test"), Loans()
    offset = arena.allocate(64)
    owner = loans.lend(arena.buffer, 3, offset, 64)
    kept = view(owner)
    del owner
    assert not loans.take_back() and loans.live == 1, "lent memory came back while it was in use"
    del kept
    assert loans.live == 0 and loans.take_back() == [(3, offset)]
    arena.close()


def test_a_view_of_one_block_keeps_no_other() -> None:
    arena, loans = Arena("test"), Loans()
    owners = [loans.lend(arena.buffer, -1, arena.allocate(100), 100) for _ in range(5)]
    kept = torch.from_numpy(owners[2])[10:20]
    owners.clear()
    assert loans.live == 1 and len(loans.take_back()) == 4
    del kept
    assert loans.live == 0 and len(loans.take_back()) == 1
    arena.close()


def test_the_memory_of_a_loaded_blob_lives_as_long_as_one_of_its_arrays() -> None:
    arena, loans = Arena("test"), Loans()
    dumped = blobs.dump({"a": torch.arange(1000), "b": [np.ones(3000)], "c": "text"})
    offset = arena.allocate(dumped.nbytes)
    blobs.write(arena.buffer[offset : offset + dumped.nbytes], dumped)
    value = blobs.load(loans.lend(arena.buffer, 0, offset, dumped.nbytes))
    kept = value.pop("b")[0][5:]
    del value
    assert loans.live == 1
    del kept
    assert loans.take_back() == [(0, offset)]
    arena.close()


def test_a_blob_without_arrays_returns_at_once() -> None:
    arena, loans = Arena("test"), Loans()
    dumped = blobs.dump(["text", 1])
    nbytes = dumped.nbytes
    blobs.write(arena.buffer[:nbytes], dumped)
    assert blobs.load(loans.lend(arena.buffer, 0, arena.allocate(nbytes), nbytes)) == ["text", 1]
    assert loans.live == 0 and len(loans.take_back()) == 1
    arena.close()


def test_every_leaf_of_a_batch_holds_the_slab() -> None:
    sample = {"x": torch.zeros(40), "n": torch.ones(40), "y": (np.zeros(160, np.uint8), np.zeros(20))}
    layout = Layout.of(sample)
    assert layout is not None
    arena, loans = Arena("test"), Loans()
    nbytes = layout.offsets(2)[1]
    for leaf in range(4):
        batch = layout.batch(loans.lend(arena.buffer, -1, arena.allocate(nbytes), nbytes), 2, [])
        kept = [batch["x"], batch["n"], *batch["y"]][leaf]
        del batch
        assert loans.live == 1, f"leaf {leaf} does not hold the memory that it lies in"
        del kept
        assert loans.live == 0
    arena.close()


def test_whoever_keeps_a_small_leaf_does_not_keep_the_batch() -> None:
    """Labels are collected by the epoch."""
    layout = Layout.of((torch.zeros(3, 100, 100), 7, "name"))
    assert layout is not None
    arena, loans = Arena("test"), Loans()
    nbytes = layout.offsets(2)[1]
    block = loans.lend(arena.buffer, -1, arena.allocate(nbytes), nbytes)
    layout.views(arena.buffer, 0, 2)[1][:] = (7, 8)  # type: ignore[index]
    batch = layout.batch(block, 2, [["a"], ["b"]])
    del block
    labels = batch[1]
    assert loans.live == 1
    del batch
    assert loans.live == 0 and labels.tolist() == [7, 8]

    dumped = blobs.dump({"image": torch.zeros(100_000), "label": torch.tensor([7, 8])})
    offset = arena.allocate(dumped.nbytes)
    blobs.write(arena.buffer[offset : offset + dumped.nbytes], dumped)
    value = blobs.load(loans.lend(arena.buffer, -1, offset, dumped.nbytes), copies_small=True)
    labels = value.pop("label")
    assert loans.live == 1
    del value
    assert loans.live == 0 and labels.tolist() == [7, 8]
    arena.close()


def test_views_outlive_arena_and_leases() -> None:
    arena, loans = Arena("test"), Loans()
    owner = loans.lend(arena.buffer, -1, arena.allocate(16), 16)
    owner[:] = 9
    tensor = torch.from_numpy(owner)[2:]
    del owner, loans
    arena.close()
    del arena
    gc.collect()
    assert tensor.tolist() == [9] * 14


def test_no_interrupt_is_lost_in_the_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python raises KeyboardInterrupt wherever it is, and what a callback raises is printed and dropped."""
    lost: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    arena, loans, caught = Arena("test"), Loans(), 0
    try:
        while caught < 300:
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4)
                while True:
                    loans.lend(arena.buffer, 0, 0, 64)
                    if len(loans._dead) > 100:
                        loans.take_back()
            except KeyboardInterrupt:
                caught += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert lost == []
    arena.close()
