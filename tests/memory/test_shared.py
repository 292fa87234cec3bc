"""Memory that leaves a worker as it is: who has it, when it is free again, and what is copied all the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minato_gpu import DataLoader, shared_empty
from minato_gpu.lanes.base import Blob
from minato_gpu.lanes.store import Store
from minato_gpu.memory import shared
from minato_gpu.memory.arena import Arena
from tests.lanes.harness import open_links

SHAPE = (3, 100, 100)


@pytest.fixture
def store() -> Iterator[Store]:
    """A worker's store, from which ``shared_empty`` gets its memory."""
    with open_links(1) as links:
        made = Store(0, links, links.arenas[0])
        assert made.handover is not None
        made.handover.serve()
        yield made
        shared._allocate = None


def _blob(store: Store, value: Any) -> Blob:
    item = store.put(value)
    assert isinstance(item, Blob)
    return item


def _free(store: Store, item: Blob) -> None:
    assert store.handover is not None
    for offset, _ in item.blocks:
        store.handover.free(offset)


def _allocated(store: Store) -> int:
    assert store.handover is not None
    with store.handover._lock:
        store.handover._forget_dead()
    return store.handover.arena.allocated


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bfloat16])
def test_what_shared_empty_made_is_not_copied(store: Store, dtype: torch.dtype) -> None:
    tensor = shared_empty((3, 200, 200), dtype)
    assert tensor.shape == (3, 200, 200) and tensor.dtype is dtype and tensor.is_contiguous()
    tensor[:] = 3
    item = _blob(store, {"image": tensor, "label": torch.tensor([1, 2])})
    assert len(item.blocks) == 2 and item.nbytes >= tensor.nbytes
    loaded = store.get(item)
    assert loaded["image"].data_ptr() - tensor.data_ptr() == 0
    assert torch.equal(loaded["image"], tensor) and loaded["label"].tolist() == [1, 2]


def test_arrays_over_it_and_views_that_begin_with_it_are_not_copied(store: Store) -> None:
    tensor = shared_empty((10, 100, 100))
    tensor[:] = torch.arange(10)[:, None, None]
    item = _blob(store, [tensor.numpy(), shared_empty((4, 200, 200))[:2]])
    assert len(item.blocks) == 3
    loaded = store.get(item)
    assert loaded[0][9].max() == 9 and loaded[1].shape == (2, 200, 200)


def test_a_view_of_its_middle_is_copied(store: Store) -> None:
    tensor = shared_empty((10, 100, 100))
    tensor[:] = torch.arange(10)[:, None, None]
    item = _blob(store, tensor[3:8])
    assert len(item.blocks) == 1 and store.get(item)[0, 0, 0] == 3


def test_it_is_free_when_neither_side_has_it(store: Store) -> None:
    tensor = shared_empty(SHAPE)
    item = _blob(store, tensor)
    _free(store, item)
    assert _allocated(store) > 0, "freed under the worker's own view"
    del tensor
    assert _allocated(store) == 0

    tensor = shared_empty(SHAPE)
    item = _blob(store, tensor)
    del tensor
    assert _allocated(store) > 0, "freed before the engine has given it back"
    _free(store, item)
    assert _allocated(store) == 0

    tensor = shared_empty(SHAPE)
    item = _blob(store, tensor)
    del tensor  # and nobody looks before the engine gives it back
    assert store.handover is not None
    for offset, _ in reversed(item.blocks):
        store.handover.free(offset)
    assert _allocated(store) == 0

    tensor = shared_empty(SHAPE)
    del tensor
    assert _allocated(store) == 0, "memory that was never returned is lost"


def test_a_tensor_that_is_returned_again_is_copied(store: Store) -> None:
    """Else the consumer's two batches would be one."""
    tensor = shared_empty(SHAPE).fill_(1)
    first = _blob(store, tensor)
    second = _blob(store, tensor)
    assert len(first.blocks) == 2 and len(second.blocks) == 1
    for item in (first, second):
        _free(store, item)
    del tensor
    assert _allocated(store) == 0


def test_what_cannot_be_pickled_keeps_nothing(store: Store) -> None:
    tensor = shared_empty(SHAPE)
    with pytest.raises(AttributeError):
        store.put([tensor, lambda: 1])
    del tensor
    assert _allocated(store) == 0


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
            assert store.handover is not None
            for offset, _ in item.blocks[:: 1 if number % 2 else -1]:
                store.handover.free(offset)
        assert all((tensor == its_mark).all() for tensor, its_mark in held)
        assert all((store.get(item) == its_mark).all() for item, its_mark in away)
    tensor = torch.empty(0)
    held.clear()
    for item, _ in away:
        _free(store, item)
    assert _allocated(store) == 0


def test_what_a_worker_forks_gets_memory_of_its_own(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that allocated from one arena would give the same memory away twice."""
    monkeypatch.setattr(os, "getpid", lambda: -2)
    assert shared_empty(SHAPE).shape == SHAPE
    assert _allocated(store) == 0


def test_discarded_results_are_free(store: Store) -> None:
    store.discard(_blob(store, shared_empty(SHAPE)))
    assert _allocated(store) == 0


def test_without_a_worker_it_is_ordinary_memory() -> None:
    assert shared._allocate is None
    assert shared_empty((2, 3), torch.int64).shape == (2, 3)
    assert shared_empty(SHAPE).dtype is torch.float32


def _pad(samples: list[Any]) -> Any:
    longest = max(len(sample) for sample in samples)
    batch = shared_empty((len(samples), longest), torch.int64)
    for row, sample in zip(batch, samples, strict=True):
        row[: len(sample)] = torch.from_numpy(sample)
        row[len(sample) :] = -1
    return batch


class _Ragged(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        return np.full(5000 + 1000 * (index * 7 % 5), index)


@pytest.mark.parametrize(("workers", "start"), [(0, None), (2, "fork"), (2, "forkserver")])
def test_padded_batches_arrive_whole(workers: int, start: str | None) -> None:
    """Memory that is used again does not show what was there before; batches that are kept do not change."""
    loader: DataLoader[Any] = DataLoader(
        _Ragged(),
        batch_size=4,
        num_workers=workers,
        collate_fn=_pad,
        multiprocessing_context=start,
        persistent_workers=workers > 0,
    )
    kept = list(loader) + list(loader)
    for number, batch in enumerate(kept):
        for row, index in zip(batch, range(number % 15 * 4, number % 15 * 4 + 4), strict=True):
            length = 5000 + 1000 * (index * 7 % 5)
            assert (row[:length] == index).all() and (row[length:] == -1).all()


def test_memory_is_reused_while_batches_are_dropped() -> None:
    loader: DataLoader[Any] = DataLoader(
        _Ragged(), batch_size=4, num_workers=1, collate_fn=_pad, persistent_workers=True
    )
    for _ in range(6):
        for batch in loader:
            del batch
    assert loader._session.engine is not None
    held = 512 * os.fstat(loader._session.engine._links.arenas[0].fd).st_blocks
    assert held < 24 * 4 * 9000 * 8, f"{held} bytes of memory for batches of 288,000"


def test_what_does_not_fit_beside_its_parts_leaves_them_to_be_freed() -> None:
    with open_links(1) as links:
        arena = Arena("small", 1 << 20)
        store = Store(0, links, arena)
        assert store.handover is not None
        part = store.handover.empty(1 << 19)
        with pytest.raises(MemoryError):
            store.put([part, np.zeros(1 << 20, np.uint8)])
        del part
        assert _allocated(store) == 0
        arena.close()
