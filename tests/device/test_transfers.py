"""Batches reach the device whole, whatever order it runs things in; and each event that is left out is noticed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from minato_gpu.device.collated import ValueLoad
from minato_gpu.device.copies import MOST
from minato_gpu.device.loads import RowsLoad, rows_bytes
from minato_gpu.samples import OutputBatch
from tests.device.bench import ORDERS, ROWS, Bench, bench, layout
from tests.support.fake_device import LAZY_COPIES, FakeDevice, Order
from tests.support.waiting import wait_until


def epoch(device: FakeDevice, batches: int = 12) -> list[Any]:
    """What the consumer read that was not what it should have been, where batches are dropped as soon as possible."""
    with bench(device) as one:
        ahead: list[tuple[int, RowsLoad]] = []
        for value in range(1, batches + 1):
            ahead.append((value, one.load(value, on_device=(1, 2, 5) if value % 2 else ())))
            one.issued(ahead[-1][1])
            one.transfers.sweep()
            if len(ahead) > 2:
                older, load = ahead.pop(0)
                one.check(one.take(load), older)
        for older, load in ahead:
            one.check(one.take(load), older)
        device.finish()
        return one.wrong


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_that_events_allow_gives_the_same_batches(order: Order) -> None:
    device = FakeDevice(order)
    assert epoch(device) == []
    gc.collect()
    assert device.used == 0
    assert device.pinned == {}


class _NoWait(FakeDevice):
    """The consumer's stream does not wait for the copies."""

    def wait(self, event: Any) -> None:
        if self.current is not self.consumer:
            super().wait(event)


class _NotUsed(FakeDevice):
    """The allocator is not told that the consumer's stream uses the batch."""

    def used_here(self, tensor: torch.Tensor) -> None:
        pass


class _LaneNotAwaited(FakeDevice):
    """The copy stream does not wait for the executor."""

    def wait(self, event: Any) -> None:
        if self.current is self.consumer:
            super().wait(event)


class _EventsAtOnce(FakeDevice):
    """An event of a load says at once that it has come to pass: what is read is given back too early."""

    def event(self, timed: bool = False) -> Any:
        event = super().event(timed)
        if self.current.name == "copies":
            event.query = lambda: True
        return event

    def stream(self) -> Any:
        stream = super().stream()
        if threading.current_thread().name == "minato-copies":
            stream.name = "copies"
        return stream


@pytest.mark.parametrize("broken", [_NoWait, _NotUsed, _LaneNotAwaited, _EventsAtOnce])
def test_an_order_is_found_in_which_a_missing_event_shows(broken: Callable[[Order], FakeDevice]) -> None:
    """Each of these leaves out one thing that the hand-over does; the test above would then fail."""
    assert any(epoch(broken(order)) for order in ORDERS)


def test_few_copies_are_issued_however_the_rows_lie() -> None:
    with bench(FakeDevice()) as one:
        one.check(one.take(one.load(1)), 1)
        assert one.transfers.stats()["copies"] == 1
        one.check(one.take(one.load(2, on_device=(1, 3, 5))), 2)
        assert one.transfers.stats()["copies"] <= 1 + MOST
        assert one.wrong == []


def test_slabs_are_free_again_once_the_copies_are_through() -> None:
    with bench(FakeDevice(LAZY_COPIES)) as one:
        load = one.load(1)
        one.issued(load)
        assert one.allocated() > 0, "the copy has not run yet"
        one.check(one.take(load), 1)  # the consumer's stream forces it
        assert one.allocated() == 0


def test_a_budget_of_one_batch_holds_the_next_back_until_the_consumer_takes_it() -> None:
    nbytes = rows_bytes(layout(), ROWS)
    with bench(FakeDevice(), limit=nbytes) as one:
        first, second = one.load(1), one.load(2)
        one.issued(first)
        assert not second.issued
        one.check(one.take(first), 1)
        one.check(one.take(second), 2)
        assert one.wrong == [] and one.transfers.stats()["device_bytes_peak"] <= nbytes


class _ScatterFails(FakeDevice):
    def scatter(self, into: Any, sources: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")


def test_the_error_of_a_batch_holds_none_of_its_memory() -> None:
    """Its frames would, in a cycle that only the garbage collector breaks; so it is kept as text."""
    device = _ScatterFails()
    gc.collect()
    gc.disable()
    try:
        with bench(device) as one:
            load = one.load(1, on_device=(1, 2, 5))
            with pytest.raises(RuntimeError, match="an illegal memory access") as caught:
                one.take(load)
            assert "in scatter" in str(caught.value)
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


@pytest.mark.parametrize("order", ORDERS)
def test_a_batch_of_any_shape_is_loaded_tensor_by_tensor(order: Order) -> None:
    device, wrong = FakeDevice(order), []
    with bench(device) as one:

        def make() -> Any:
            return {"image": torch.full((2, 3), 7.0), "names": ["a", "b"], "pair": (torch.arange(3), torch.tensor([]))}

        load = ValueLoad(make, 48)
        one.submit(load)
        batch = one.take(load)
        assert batch["names"] == ["a", "b"] and batch["pair"][1].shape == (0,)
        device.read(batch["image"], lambda t: wrong.append(t) if t.tolist() != [[7.0] * 3] * 2 else None)
        device.read(batch["pair"][0], lambda t: wrong.append(t) if t.tolist() != [0, 1, 2] else None)
        del batch
        device.finish()
    assert wrong == []


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


class _NoPeers(FakeDevice):
    """Waits for no event of another device."""

    def wait(self, event: Any) -> None:
        if event.stream in self.streams:
            super().wait(event)


def _crossing(order: Order, kind: type[FakeDevice]) -> list[Any]:
    """What was wrong in batches some of whose rows another device has made."""
    device = kind(order)
    maker = FakeDevice(order, beside=[device])
    with bench(device) as one:
        loads = []
        for value in range(1, 13):
            loads.append(one.load(value, (1, 2, 6), maker if value % 3 else None))
            if len(loads) == 3:
                load = loads.pop(0)
                one.check(one.take(load), value - 2)
                del load
                one.transfers.sweep()
        for value, load in enumerate(loads, 11):
            one.check(one.take(load), value)
        device.finish()
        assert device.crossed == 24 == 3 * one.transfers.stats()["crossed"]
        maker.finish()
        return one.wrong


@pytest.mark.parametrize("order", ORDERS)
def test_what_another_device_has_made_crosses_over_in_every_order(order: Order) -> None:
    assert _crossing(order, FakeDevice) == []


def test_an_event_of_another_device_that_is_not_waited_for_shows() -> None:
    assert _crossing(LAZY_COPIES, _NoPeers) != []
