"""Which copies fill a batch: few and complete; and what they read is kept until they are through."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minato_gpu.device.copies import MOST, CopyRange, plan
from minato_gpu.device.loads import Load
from tests.device.bench import ORDERS, Bench, bench
from tests.support.fake_device import LAZY_COPIES, FakeDevice, Foreign, Order
from tests.support.waiting import wait_until


def test_a_slab_is_one_copy() -> None:
    assert plan([CopyRange(4096, 0, 600), CopyRange(4696, 600, 40)]) == [CopyRange(4096, 0, 640)]


def test_gaps_that_the_device_fills_are_bridged_smallest_first() -> None:
    runs = [CopyRange(1000 + at, at, 10) for at in (0, 20, 50, 100, 170)]
    assert plan(runs, most=5) == runs
    assert plan(runs, most=4) == [CopyRange(1000, 0, 30), *runs[2:]]
    assert plan(runs, most=2) == [CopyRange(1000, 0, 110), runs[4]]
    assert plan(runs, most=1) == [CopyRange(1000, 0, 180)]


def test_rows_that_lie_apart_differently_cannot_be_joined() -> None:
    runs = [CopyRange(1000 * at, 10 * at, 10) for at in range(9)]
    assert plan(runs) is None
    assert plan(runs[:MOST]) == runs[:MOST]


def test_no_copy_crosses_the_end_of_a_pinned_piece() -> None:
    assert plan([CopyRange(90, 5, 30)], ends=[100, 110, 200]) == [
        CopyRange(90, 5, 10),
        CopyRange(100, 15, 10),
        CopyRange(110, 25, 10),
    ]
    assert plan([CopyRange(90, 5, 30)], ends=[100, 110, 200], most=2) is None


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


def _put_back(one: Bench, kind: str) -> tuple[Load, Load]:
    """The batch that is due, and the next, which has been put back."""
    first = one.load(1)
    one.issued(first)
    second = LOADS[kind](one)
    assert wait_until(lambda: one.transfers.stats()["short_of_memory"] == 1)
    return first, second


@pytest.mark.parametrize("kind", LOADS)
def test_a_load_that_was_put_back_comes_whole_and_leaves_nothing(kind: str) -> None:
    device = _Short(LAZY_COPIES)
    with bench(device) as one:
        first, second = _put_back(one, kind)
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
        return super().adopt(Foreign(self, value, blocks=True))


class _EventsAtOnce(_Borrowing):
    """A load's event says at once that it has come to pass: what is read is given back too early."""

    def event(self, timed: bool = False) -> Any:
        event = super().event(timed)
        if self.current is not self.consumer:
            event.query = lambda: True
        return event


def borrowed(device: FakeDevice, maker: FakeDevice | None = None) -> list[Any]:
    """What the consumer read that was not what it should have been."""
    with bench(device) as one:
        for value in range(1, 13):
            load = one.load(value, (1, 2, 5) if value % 2 else (), maker)
            batch = one.take(load)
            del load
            one.transfers.sweep()
            gc.collect()
            one.check(batch, value)
            del batch
        device.finish()
        if maker is not None:
            maker.finish()
        return one.wrong


@pytest.mark.parametrize("order", ORDERS)
def test_it_is_read_before_it_is_given_back(order: Order) -> None:
    """Also that of another device."""
    assert borrowed(_Borrowing(order)) == []
    device = FakeDevice(order)
    assert borrowed(device, _Borrowing(order, beside=[device])) == []


def test_what_is_given_back_too_early_shows() -> None:
    assert borrowed(_EventsAtOnce(LAZY_COPIES)) != []
