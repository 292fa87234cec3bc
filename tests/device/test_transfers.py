"""Batches reach the device whole, in few copies, whatever order it runs things in."""

from __future__ import annotations

import gc
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minato_gpu.device.accelerator import Accelerator
from minato_gpu.device.collated import ValueLoad
from minato_gpu.device.copies import CopyRange, plan
from minato_gpu.device.loads import Load, RowsLoad
from minato_gpu.device.pinned_memory import PinnedArena
from minato_gpu.memory import arena as arenas
from minato_gpu.memory.arena import Arena
from minato_gpu.memory.loans import Loans
from minato_gpu.samples import OutputBatch
from tests.device.bench import ORDERS, ROWS, Bench, bench, layout
from tests.support.fake_device import LAZY_COPIES, FakeDevice, Foreign, Order
from tests.support.waiting import wait_until


def epoch(device: FakeDevice, maker: FakeDevice | None = None, ahead: int = 2) -> list[Any]:
    """What the consumer read of 12 batches that was not what it should have been, where they are dropped as soon as
    possible. Some rows of every other one are made on a device (``maker``); ``ahead``: batches that are loaded before
    one is taken."""
    with bench(device) as one:
        loads: deque[RowsLoad] = deque()
        for value in range(1, 13 + ahead):
            if value <= 12:
                loads.append(one.load(value, (1, 2, 5) if value % 2 else (), maker))
                one.issued(loads[-1])
            if value > ahead:
                batch = one.take(loads.popleft())
                one.transfers.sweep()
                gc.collect()
                one.check(batch, value - ahead)
                del batch
        device.finish()
        if maker is not None:
            maker.finish()
            assert device.crossed == 18 == 3 * one.transfers.stats()["crossed"]
        return one.wrong


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_that_events_allow_gives_the_same_batches(order: Order) -> None:
    device = FakeDevice(order)
    assert epoch(device) == []
    gc.collect()
    assert device.used == 0
    assert device.pinned == {}


def test_slabs_are_free_again_once_the_copies_are_through() -> None:
    with bench(FakeDevice(LAZY_COPIES)) as one:
        load = one.load(1)
        one.issued(load)
        assert one.allocated() > 0, "the copy has not run yet"
        one.check(one.take(load), 1)  # the consumer's stream forces it
        assert one.allocated() == 0


class _CopyFails(FakeDevice):
    def copy(self, into: Any, sources: Any) -> None:
        if any(map(self.owns, sources)):
            raise RuntimeError("an illegal memory access was encountered")
        super().copy(into, sources)


def test_the_error_of_a_batch_holds_none_of_its_memory() -> None:
    """Its frames would, in a cycle that only the garbage collector breaks; so it is kept as text."""
    device = _CopyFails()
    gc.collect()
    gc.disable()
    try:
        with bench(device) as one:
            load = one.load(1, on_device=(1, 2, 5))
            with pytest.raises(RuntimeError, match="an illegal memory access") as caught:
                one.take(load)
            assert "in copy" in str(caught.value)
            device.finish()
            one.transfers.sweep()
            assert wait_until(lambda: device.used == 0)
    finally:
        gc.enable()


def test_a_cancelled_load_is_not_copied_and_frees_what_it_would_have_read() -> None:
    nbytes = layout().offsets(ROWS)[1]
    with bench(FakeDevice(), limit=nbytes) as one:
        first, second, third = (one.load(value) for value in (1, 2, 3))
        one.issued(first)
        for load in (second, third, first):
            one.transfers.leave(load)
        one.transfers.expect(OutputBatch(3))  # as who begins anew does
        one.check(one.take(one.load(4)), 4)
        assert one.transfers.stats()["batches"] == 2
        assert one.transfers.budget.held["batches"] == 0
        del first
        assert one.allocated() == 0 and one.wrong == []


_UNUSUAL: dict[str, tuple[Callable[[], torch.Tensor], int]] = {
    "requires grad": (lambda: torch.ones(3, requires_grad=True), 1),
    "conjugate": (lambda: torch.tensor([1 + 2j]).conj(), 1),
    "sparse COO": (lambda: torch.eye(3).to_sparse(), 2),
    "sparse CSR": (lambda: torch.eye(3).to_sparse_csr(), 3),
    "subclass": (lambda: torch.nn.Parameter(torch.ones(2)), 1),
    "empty": (lambda: torch.empty(0, 3), 0),
}
"""Tensors that are moved by PyTorch itself, and of how many pieces of memory they consist."""


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta:UserWarning")
@pytest.mark.parametrize("kind", _UNUSUAL)
def test_the_consumer_is_recorded_as_user_of_unusual_tensors_too(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else their memory is given away while the consumer's kernels still read it, when the consumer drops them."""
    value, pieces = _UNUSUAL[kind][0](), _UNUSUAL[kind][1]
    device = FakeDevice()
    recorded: list[torch.Tensor] = []
    monkeypatch.setattr(device, "used_here", recorded.append)
    with bench(device) as one:
        load = ValueLoad(lambda: {"x": value}, 48)
        one.submit(load)
        moved = one.take(load)["x"]
    assert len(recorded) == pieces and all(part.layout is torch.strided for part in recorded)
    assert moved.layout == value.layout and moved.requires_grad == value.requires_grad


def test_closing_waits_for_what_is_under_way_and_ends_the_thread(no_leaks: None) -> None:
    device = FakeDevice(LAZY_COPIES)
    one = Bench(device)
    loads = [one.load(value) for value in (1, 2, 3)]
    one.issued(loads[0])
    one.close()
    one.close()
    assert one.allocated() == 0 and device.pinned == {}
    one.arena.close()


@pytest.mark.parametrize("order", ORDERS)
def test_what_another_device_has_made_crosses_over_in_every_order(order: Order) -> None:
    device = FakeDevice(order)
    assert epoch(device, FakeDevice(order, beside=[device])) == []


def test_gaps_that_the_device_fills_are_bridged_smallest_first() -> None:
    runs = [CopyRange(1000 + at, at, 10) for at in (0, 20, 50, 100, 170)]
    assert plan(runs, most=5) == runs
    assert plan(runs, most=4) == [CopyRange(1000, 0, 30), *runs[2:]]
    assert plan(runs, most=2) == [CopyRange(1000, 0, 110), runs[4]]
    assert plan(runs, most=1) == [CopyRange(1000, 0, 180)]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5), st.sampled_from([0, 1000])), max_size=40),
    st.lists(st.integers(0, 1200), max_size=3),
    st.integers(1, 8),
)
def test_every_byte_that_is_wanted_arrives(parts: list[tuple[int, int, int]], ends: list[int], most: int) -> None:
    """And what else is written lies in gaps between runs, where nothing wanted is."""
    runs, at = [], 0
    for nbytes, gap, apart in parts:
        runs.append(CopyRange(at + apart, at, nbytes))
        at += nbytes + gap
    found = plan(runs, sorted(ends), most)
    if found is None:
        return
    assert len(found) <= most
    source_of = {run.target + n: run.source + n for run in found for n in range(run.nbytes)}
    assert len(source_of) == sum(run.nbytes for run in found), "a byte is written twice"
    for run in runs:
        for n in range(run.nbytes):
            assert source_of[run.target + n] == run.source + n
    for run in found:
        assert not any(run.source < end < run.source + run.nbytes for end in ends)


# --- of a load that is put back half way -----------------------------------------------------------------------


class _Short(FakeDevice):
    """There is no memory for the small parts of the second batch: its copies have been issued by then."""

    asked = 0

    def empty(self, nbytes: int) -> torch.Tensor:
        if threading.current_thread().name == "minato-copies":
            self.asked += 1
            if self.asked == 4:
                raise torch.OutOfMemoryError("for the small parts")
        return super().empty(nbytes)


LOADS: dict[str, Callable[[Bench], Load]] = {
    "one slab": lambda one: one.load(2),
    "gathered": lambda one: one.scattered(2),
    "made on the device": lambda one: one.load(2, on_device=(1, 2, 5)),
}


@pytest.mark.parametrize("kind", LOADS)
def test_a_load_that_was_put_back_comes_whole_and_leaves_nothing(kind: str) -> None:
    device = _Short(LAZY_COPIES)
    with bench(device) as one:
        first = one.load(1)
        one.issued(first)
        second = LOADS[kind](one)
        assert wait_until(lambda: one.transfers.stats()["short_of_memory"] == 1)
        one.check(one.take(first), 1)
        one.check(one.take(second), 2)
        del first, second
        device.finish()
        assert one.wrong == [] and one.allocated() == 0
    assert device.used == 0


# --- of other libraries' memory, which PyTorch borrows ---------------------------------------------------------


class _Borrowing(FakeDevice):
    """What is made there lies in another library's memory; to give it back may stop a thread."""

    def adopt(self, value: Any) -> torch.Tensor:
        return super().adopt(Foreign(self, value))


@pytest.mark.parametrize("order", ORDERS)
def test_it_is_read_before_it_is_given_back(order: Order) -> None:
    """Also that of another device."""
    assert epoch(_Borrowing(order), ahead=0) == []
    device = FakeDevice(order)
    assert epoch(device, _Borrowing(order, beside=[device]), ahead=0) == []


# --- host memory that is pinned: it covers what is used, and is given back ------------------------------------

STEP = 1 << 16


class _Refusing(FakeDevice):
    def pin(self, address: int, nbytes: int) -> None:
        raise RuntimeError("not on this machine")


@pytest.mark.parametrize(
    ("kind", "covered", "kept"), [(FakeDevice, 1, STEP), (FakeDevice, 4 * STEP, 4 * STEP), (_Refusing, 1, 0)]
)
def test_only_what_is_pinned_is_kept(
    monkeypatch: pytest.MonkeyPatch, kind: type[FakeDevice], covered: int, kept: int
) -> None:
    """A device would go on reading pages that were given back after the next write went to others. The rest of a free
    extent goes back to the kernel, and so does all of it where the device has refused."""
    monkeypatch.setattr(arenas, "_KEEP_FREE", 0)
    monkeypatch.setattr(arenas, "_LATELY", 1)
    arena = Arena("tests", 1 << 24)
    pinned = PinnedArena(arena, Loans(), kind(), STEP)
    pinned.cover(covered)
    for size in (4 * STEP, *[mmap.PAGESIZE] * 8):
        offset = arena.allocate(size)
        np.frombuffer(arena.buffer, np.uint8, size, offset)[:] = 7
        arena.free(offset)
    assert os.fstat(arena.fd).st_blocks * 512 <= kept + mmap.PAGESIZE
    assert (np.frombuffer(arena.buffer, np.uint8, kept, 0) == 7).all()
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
            device.copy([target], [torch.from_numpy(host)])
            device.event().synchronize()
        assert bool((target == value).all())
    pinned.close()
    del host
    arena.close()
