"""Loans: memory comes back when the last thing that refers to it dies; and memory that leaves a worker as it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minato_gpu import shared_empty
from minato_gpu.lanes.base import Blob
from minato_gpu.lanes.store import Store
from minato_gpu.memory import blobs, worker_blocks
from minato_gpu.memory.arena import Arena
from minato_gpu.memory.layout import Layout
from minato_gpu.memory.loans import Loans
from tests.lanes.harness import open_links

_VIEWS: dict[str, Callable[[Any], Any]] = {
    "the array": lambda owner: owner,
    "another dtype": lambda owner: owner.view(np.float32).reshape(2, -1),
    "a tensor": torch.from_numpy,
    "a transposed view": lambda owner: torch.from_numpy(owner).view(8, 8).t()[2],
    "a row that iteration gave": lambda owner: list(torch.from_numpy(owner).view(8, 8))[3],
    "detached": lambda owner: torch.from_numpy(owner).view(torch.float32).requires_grad_().detach(),
    "a storage": lambda owner: torch.from_numpy(owner).untyped_storage(),
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


def test_no_interrupt_is_lost_in_the_callback() -> None:
    """Python raises KeyboardInterrupt wherever it is, and drops what a callback raises: this one is not in Python."""
    arena, loans = Arena("test"), Loans()
    kept = loans.lend(arena.buffer, 0, arena.allocate(64), 64)
    (loan,) = loans._live.values()
    assert isinstance(loan.__callback__, BuiltinFunctionType)
    del kept
    arena.close()


# --- memory that leaves a worker as it is -----------------------------------------------------------------------

SHAPE = (3, 100, 100)


@pytest.fixture
def store() -> Iterator[Store]:
    """A worker's store, from which ``shared_empty`` gets its memory."""
    with open_links(1) as links:
        made = Store(0, links, links.arenas[0])
        _handover(made).serve()
        yield made
        worker_blocks._allocate = None


def _handover(store: Store) -> Any:
    assert store.handover is not None
    return store.handover


def _blob(store: Store, value: Any) -> Blob:
    item = store.put(value)
    assert isinstance(item, Blob)
    return item


def _allocated(store: Store) -> int:
    handover = _handover(store)
    with handover._lock:
        handover._forget_dead()
    return int(handover.arena.allocated)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bfloat16])
def test_what_shared_empty_made_is_not_copied_and_a_view_of_its_middle_is(store: Store, dtype: torch.dtype) -> None:
    tensor = shared_empty((3, 200, 200), dtype)
    assert tensor.shape == (3, 200, 200) and tensor.dtype is dtype and tensor.is_contiguous()
    tensor[:] = torch.arange(3)[:, None, None]
    middle = _blob(store, [tensor[1:], torch.arange(100_000)])
    assert len(middle.blocks) == 1 and store.get(middle)[0][0, 0, 0] == 1
    item = _blob(store, {"image": tensor, "label": torch.tensor([1, 2])})
    assert len(item.blocks) == 2 and item.nbytes >= tensor.nbytes
    loaded = store.get(item)
    assert loaded["image"].data_ptr() - tensor.data_ptr() == 0
    assert torch.equal(loaded["image"], tensor) and loaded["label"].tolist() == [1, 2]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(["make", "put", "drop", "give back"]), st.integers(0, 9)), max_size=50))
def test_no_block_is_lost_or_given_away_twice(store: Store, steps: list[tuple[str, int]]) -> None:
    """Whatever dies, is handed over and comes back in whatever order: nothing that is held changes."""
    held: list[tuple[torch.Tensor, int]] = []
    away: list[tuple[Blob, int]] = []
    for mark, (what, number) in enumerate(steps):
        if what == "make":
            held.append((shared_empty(SHAPE).fill_(mark), mark))
        elif what == "put" and held:
            tensor, its_mark = held[number % len(held)]
            away.append((_blob(store, tensor), its_mark))
        elif what == "drop" and held:
            del held[number % len(held)]
            tensor = torch.empty(0)
        elif what == "give back" and away:
            item, _ = away.pop(number % len(away))
            for offset, _ in item.blocks[:: 1 if number % 2 else -1]:
                _handover(store).free(offset)
        assert all((tensor == its_mark).all() for tensor, its_mark in held)
        assert all((store.get(item) == its_mark).all() for item, its_mark in away)
    tensor = torch.empty(0)
    held.clear()
    for item, _ in away:
        for offset, _ in item.blocks:
            _handover(store).free(offset)
    assert _allocated(store) == 0


def test_what_a_worker_forks_gets_memory_of_its_own(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that allocated from one arena would give the same memory away twice."""
    monkeypatch.setattr(os, "getpid", lambda: -2)
    assert shared_empty(SHAPE).shape == SHAPE
    assert _allocated(store) == 0


def test_what_does_not_fit_beside_its_parts_leaves_them_to_be_freed() -> None:
    with open_links(1) as links:
        arena = Arena("small", 1 << 20)
        store = Store(0, links, arena)
        part = _handover(store).empty(1 << 19)
        with pytest.raises(MemoryError):
            store.put([part, np.zeros(1 << 20, np.uint8)])
        del part
        assert _allocated(store) == 0
        arena.close()
