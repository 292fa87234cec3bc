"""Batches reach the device whole, whatever order it runs things in; and each event that is left out is noticed."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu.memory.arena import Arena
from minato_gpu.memory.copies import MOST, Run
from minato_gpu.memory.device_budget import DeviceBudget
from minato_gpu.memory.layout import Layout
from minato_gpu.memory.loads import DeviceRows, Load, Made, RowsLoad, ValueLoad, rows_bytes
from minato_gpu.memory.transfers import Host, Transfers
from minato_gpu.notices import LOGGER
from tests.fake_device import CANARY, LAZY_CONSUMER, LAZY_COPIES, FakeDevice, FakeEvent, FakeStream, Order
from tests.waiting import wait_until

ORDERS = [LAZY_COPIES, LAZY_CONSUMER, *range(6)]
ROWS = 8
SAMPLE = {"image": np.zeros((3, 40), np.float32), "label": 0}


def layout() -> Layout:
    found = Layout.of(SAMPLE)
    assert found is not None
    return found


class Bench:
    """An arena, its way to a device, and an executor's stream on it."""

    def __init__(self, device: FakeDevice, limit: int | None = None) -> None:
        self.device = device
        self.arena = Arena("tests", 1 << 24)
        self.host = Host(self.arena, device)
        self.transfers = Transfers(device, self.host, DeviceBudget(limit))
        self.layout = layout()
        self.lanes: dict[FakeDevice, FakeStream] = {}
        self.wrong: list[Any] = []
        self.submitted = 0

    def slab(self, value: int, rows: int = ROWS) -> int:
        """A slab with all rows written; label n is ``100 * value + n``."""
        offset = self.arena.allocate(self.layout.offsets(rows)[1])
        image, label = self.layout.views(self.arena.buffer, offset, rows)
        assert image is not None and label is not None
        image[:] = value
        label[:] = 100 * value + np.arange(rows)
        return offset

    def load(self, value: int, on_device: tuple[int, ...] = (), maker: FakeDevice | None = None) -> RowsLoad:
        """A batch from one slab; the images of some rows are made on a device (``maker``), and garbage in the slab."""
        maker = maker or self.device
        slab = self.slab(value)
        offsets, nbytes = self.layout.offsets(ROWS)
        image = self.layout.leaves[0].nbytes
        runs = [Run(slab + n * image, n * image, image) for n in range(ROWS) if n not in on_device]
        runs.append(Run(slab + offsets[1], offsets[1], nbytes - offsets[1]))
        rows, made = [], set()
        if on_device:
            self.layout.views(self.arena.buffer, slab, ROWS)[0][list(on_device)] = -1  # type: ignore[index]
            with maker.running(self.lanes.setdefault(maker, maker.stream())):
                sources = [maker.adopt(np.full((3, 40), value, np.float32)) for _ in on_device]
                one = Made(maker.event(), maker)
            made.add(one)
            ways = [(one, Run(slab + n * image, n * image, image)) for n in on_device]
            rows.append(DeviceRows(0, list(on_device), sources, ways))
        load = RowsLoad(self.layout, ROWS, [], runs, rows, made, (slab,))
        self.submit(load)
        self.transfers.slabs.drop(slab)
        return load

    def scattered(self, value: int) -> RowsLoad:
        """A batch whose rows come from as many slabs, one from each."""
        offsets, _ = self.layout.offsets(ROWS)
        slabs = [self.slab(value, rows=n + 1) for n in range(ROWS)]
        runs = []
        for n, slab in enumerate(slabs):
            for leaf, at, begin in zip(self.layout.leaves, offsets, self.layout.offsets(n + 1)[0], strict=True):
                runs.append(Run(slab + begin + n * leaf.nbytes, at + n * leaf.nbytes, leaf.nbytes))
        load = RowsLoad(self.layout, ROWS, [], runs, [], set(), tuple(slabs))
        self.submit(load)
        for slab in slabs:
            self.transfers.slabs.drop(slab)
        return load

    def submit(self, load: Load, order: int | None = None) -> None:
        """Ask for a load, of the next batch if nothing else is said."""
        load.order = self.submitted if order is None else order
        self.submitted += 1
        self.transfers.submit(load)

    def close(self) -> None:
        """As an engine does it."""
        self.transfers.close()
        self.host.close()

    def issued(self, load: Load) -> None:
        """Wait until the thread has issued the load."""

        def look() -> bool:
            self.transfers.room_made()  # as who waits for a batch does: there are no samples here
            return load.issued

        assert wait_until(look)

    def take(self, load: Load) -> Any:
        """The batch, as the consumer gets it."""
        self.issued(load)
        self.transfers.leave(load)
        self.transfers.expect(load.order + 1)
        if load.error is not None:
            load.error.reraise()
        return load.hand_over(self.device)

    def check(self, batch: Any, value: int) -> None:
        """Let the consumer's stream read all of the batch, and drop it before that has happened."""

        def images(tensor: torch.Tensor) -> None:
            if not bool((tensor == value).all()):
                self.wrong.append(("image", value, tensor.clone()))

        def labels(tensor: torch.Tensor) -> None:
            if tensor.tolist() != [100 * value + n for n in range(ROWS)]:
                self.wrong.append(("label", value, tensor.clone()))

        self.device.read(batch["image"], images)
        self.device.read(batch["label"], labels)


@contextmanager
def bench(device: FakeDevice, limit: int | None = None) -> Iterator[Bench]:
    one = Bench(device, limit)
    try:
        yield one
    finally:
        one.close()
        device.finish()
        one.arena.close()


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

    def event(self, timed: bool = False) -> FakeEvent:
        event = super().event(timed)
        if self.current.name == "copies":
            event.query = lambda: True  # type: ignore[method-assign]
        return event

    def stream(self) -> Any:
        stream = super().stream()
        if threading.current_thread().name == "minato-copies":
            stream.name = "copies"
        return stream


@pytest.mark.parametrize("broken", [_NoWait, _NotUsed, _LaneNotAwaited, _EventsAtOnce])
def test_an_order_is_found_in_which_a_missing_event_shows(broken: Callable[[Order], FakeDevice]) -> None:
    """Each of these leaves out one thing that the hand-over does; the test above would then fail."""
    assert any(_fails(broken(order)) for order in ORDERS)


def _fails(device: FakeDevice) -> bool:
    return bool(epoch(device))


def test_what_was_never_copied_shows_as_canaries() -> None:
    device = FakeDevice()
    tensor = device.empty(4)
    assert tensor.tolist() == [CANARY] * 4


def test_few_copies_are_issued_however_the_rows_lie() -> None:
    with bench(FakeDevice()) as one:
        one.check(one.take(one.load(1)), 1)
        assert one.transfers.stats()["copies"] == 1
        one.check(one.take(one.load(2, on_device=(1, 3, 5))), 2)
        assert one.transfers.stats()["copies"] <= 1 + MOST
        assert one.wrong == []


def test_rows_from_many_slabs_are_gathered_on_the_host_and_copied_once() -> None:
    with bench(FakeDevice()) as one:
        one.check(one.take(one.scattered(3)), 3)
        assert one.wrong == []
        stats = one.transfers.stats()
        assert (stats["gathered"], stats["copies"]) == (1, 1)
        one.transfers.sweep()
        assert one.arena.allocated == 0


def test_small_parts_do_not_keep_the_whole_batch() -> None:
    with bench(FakeDevice(LAZY_CONSUMER)) as one:
        labels = one.take(one.load(1))["label"]
        one.transfers.sweep()
        gc.collect()
        assert one.device.used == labels.numel() * 8


def test_slabs_are_free_again_once_the_copies_are_through() -> None:
    with bench(FakeDevice(LAZY_COPIES)) as one:
        load = one.load(1)
        one.issued(load)
        one.transfers.sweep()
        assert one.arena.allocated > 0, "the copy has not run yet"
        one.check(one.take(load), 1)  # the consumer's stream forces it
        one.transfers.sweep()
        assert one.arena.allocated == 0


def test_a_budget_of_one_batch_holds_the_next_back_until_the_consumer_takes_it() -> None:
    nbytes = rows_bytes(layout(), ROWS)
    with bench(FakeDevice(), limit=nbytes) as one:
        first, second = one.load(1), one.load(2)
        one.issued(first)
        assert not second.issued
        one.check(one.take(first), 1)
        one.check(one.take(second), 2)
        assert one.wrong == [] and one.transfers.stats()["device_bytes_peak"] <= nbytes


def test_a_budget_below_one_batch_stops_nothing() -> None:
    with bench(FakeDevice(), limit=1) as one:
        loads = [one.load(value) for value in (1, 2, 3)]
        for value, load in enumerate(loads, 1):
            one.check(one.take(load), value)
        assert one.wrong == []


@pytest.mark.parametrize("guess", [8, 1 << 20])
def test_a_batch_that_is_no_rows_counts_with_what_its_tensors_take(guess: int) -> None:
    """Its pickle may be smaller, where a tensor repeats itself, or larger, for all that is no tensor."""
    with bench(FakeDevice()) as one:
        load = ValueLoad(lambda: (torch.zeros(1).expand(1000), "x" * 5000, torch.zeros(10)), guess)
        one.submit(load)
        one.issued(load)
        assert one.transfers.budget.held["batches"] == one.transfers.batch_bytes == 4040 or guess > 4040
        assert one.transfers.budget.held["batches"] == one.device.used == 4040
        one.take(load)
        assert one.transfers.budget.held["batches"] == 0


def test_a_later_batch_that_came_first_does_not_keep_the_next_one_back() -> None:
    """In strict order batches are composed as they become complete, and the budget has room for one."""
    with bench(FakeDevice(), limit=1) as one:
        loads = [ValueLoad(lambda value=value: torch.tensor([value]), 8) for value in range(3)]  # type: ignore[misc]
        one.transfers.expect(1)
        for order in (1, 2, 0):
            one.submit(loads[order], order)
        one.issued(loads[1])
        one.transfers.expect(0)
        batches = [one.take(load) for load in loads]
        one.device.finish()
        assert [batch.tolist() for batch in batches] == [[0], [1], [2]]


def test_a_batch_that_finds_no_memory_raises_for_the_consumer_and_the_next_goes_on() -> None:
    with bench(FakeDevice(capacity=100)) as one:
        load = one.load(1)
        with pytest.raises(torch.OutOfMemoryError):
            one.take(load)
        one.device.capacity = 1 << 20
        one.check(one.take(one.load(2)), 2)
        one.transfers.sweep()
        assert one.wrong == [] and one.arena.allocated == 0


class _EventFails(FakeDevice):
    """There is no memory for the first event after a load."""

    failed = False

    def event(self, timed: bool = False) -> FakeEvent:
        if threading.current_thread().name == "minato-copies" and not self.failed:
            self.failed = True
            raise torch.OutOfMemoryError("for an event")
        return super().event(timed)


@pytest.mark.parametrize("order", ORDERS[:2])
def test_a_load_whose_event_finds_no_memory_is_issued_once_more_with_all_its_rows(order: Order) -> None:
    device = _EventFails(order)
    with bench(device) as one:
        one.check(one.take(one.load(1, on_device=(1, 2, 5))), 1)
        device.finish()
        assert one.wrong == [] and device.failed
    gc.collect()
    assert device.used == 0


def test_a_batch_that_is_no_rows_is_issued_once_more_too() -> None:
    device, seen = _EventFails(), []
    with bench(device) as one:
        load = ValueLoad(lambda: torch.arange(3), 24)
        one.submit(load)
        device.read(one.take(load), lambda tensor: seen.append(tensor.tolist()))
        device.finish()
    assert seen == [[0, 1, 2]] and device.failed


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
        one.transfers.expect(3)  # as who begins anew does
        one.check(one.take(one.load(4)), 4)
        assert one.transfers.stats()["batches"] == 2
        assert one.transfers.budget.held["batches"] == 0
        del first
        one.transfers.sweep()
        assert one.arena.allocated == 0 and one.wrong == []


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


_UNUSUAL = ("requires grad", "conjugate", "sparse COO", "sparse CSR", "sparse CSC", "subclass", "empty")


def _unusual() -> dict[str, tuple[torch.Tensor, int]]:
    """Tensors that are moved by PyTorch itself, and of how many pieces of memory they consist."""
    return {
        "requires grad": (torch.ones(3, requires_grad=True), 1),
        "conjugate": (torch.tensor([1 + 2j]).conj(), 1),
        "sparse COO": (torch.eye(3).to_sparse(), 2),
        "sparse CSR": (torch.eye(3).to_sparse_csr(), 3),
        "sparse CSC": (torch.eye(3).to_sparse_csc(), 3),
        "subclass": (torch.nn.Parameter(torch.ones(2)), 1),
        "empty": (torch.empty(0, 3), 0),
    }


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta:UserWarning")
@pytest.mark.parametrize("kind", _UNUSUAL)
def test_the_consumer_is_recorded_as_user_of_unusual_tensors_too(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else their memory is given away while the consumer's kernels still read it, when the consumer drops them."""
    value, pieces = _unusual()[kind]
    device = FakeDevice()
    recorded: list[torch.Tensor] = []
    monkeypatch.setattr(device, "used_here", recorded.append)
    with bench(device) as one:
        load = ValueLoad(lambda: {"x": value}, 48)
        one.submit(load)
        moved = one.take(load)["x"]
    assert len(recorded) == pieces and all(part.layout is torch.strided for part in recorded)
    assert moved.layout == value.layout and moved.requires_grad == value.requires_grad


class _Elsewhere(FakeDevice):
    """What PyTorch itself has moved there lies on the host no more."""

    device = torch.device("meta")


def test_what_stays_when_its_batch_is_unloaded_is_counted_and_recorded_once_it_is_loaded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, recorded = _Elsewhere(), list[torch.Tensor]()
    monkeypatch.setattr(device, "used_here", recorded.append)
    with bench(device) as one:
        load = ValueLoad(lambda: [torch.ones(3), torch.ones(4, requires_grad=True), torch.tensor([1j]).conj()], 48)
        one.submit(load, 2)
        one.issued(load)
        measured = load.nbytes
        for _ in range(2):
            assert one.transfers._unload_last(Load(0, ()))
            one.transfers.expect(0)  # it is loaded again
            one.issued(load)
        one.take(load)
        assert load.nbytes == measured and not load._stayed
    assert sorted(part.numel() for part in recorded) == [1, 3, 4]


def test_an_error_while_making_a_batch_is_the_consumers() -> None:
    with bench(FakeDevice()) as one:

        def make() -> Any:
            raise KeyError("no such part")

        load = ValueLoad(make, 8)
        one.submit(load)
        with pytest.raises(KeyError, match="no such part"):
            one.take(load)


def test_a_copy_that_has_not_run_keeps_the_device_from_letting_memory_go() -> None:
    """The fake device's own check, on which the next test relies."""
    device, arena = FakeDevice(LAZY_COPIES), Arena("tests", 1 << 20)
    host = torch.from_numpy(np.frombuffer(arena.buffer, np.uint8, 64, 0))
    device.pin(host.data_ptr(), 4096)
    with device.running(device.stream()):
        target = device.empty(64)
        device.copy(target, host)
    with pytest.raises(AssertionError, match="may still read"):
        device.unpin(host.data_ptr())
    device.finish()
    del host
    arena.close()


def test_closing_waits_for_what_is_under_way_and_ends_the_thread(no_leaks: None) -> None:
    device = FakeDevice(LAZY_COPIES)
    one = Bench(device)
    loads = [one.load(value) for value in (1, 2, 3)]
    one.issued(loads[0])
    one.close()
    one.close()
    assert one.arena.allocated == 0 and device.pinned == {}
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


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("later", ["rows", "scattered", "value"])
def test_batches_that_are_loaded_ahead_leave_for_the_one_that_is_due(order: Order, later: str) -> None:
    """The device holds two batches: one that the consumer has, and whichever came first of those to come."""
    nbytes = rows_bytes(layout(), ROWS)
    device, seen = FakeDevice(order, capacity=2 * nbytes + nbytes // 2), []
    with bench(device) as one:
        held = one.take(one.load(1))
        one.submitted = 2  # the batch before it is not complete yet
        if later == "rows":
            behind: Load = one.load(3, on_device=(1, 2))
        elif later == "scattered":
            behind = one.scattered(3)
        else:
            behind = ValueLoad(lambda: {"image": torch.full((nbytes // 4,), 3.0), "other": ("a", 3)}, nbytes)
            one.submit(behind)
        one.issued(behind)
        one.submitted = 1
        one.check(one.take(one.load(2)), 2)
        assert one.transfers.stats()["unloaded"] == 1
        one.check(held, 1)
        del held
        gc.collect()
        batch = one.take(behind)
        if later == "value":
            assert batch["other"] == ("a", 3)
            device.read(batch["image"], lambda t: seen.append(t.unique().tolist()))
        else:
            one.check(batch, 3)
        del batch
        device.finish()
        assert one.wrong == [] and seen == [[3.0]] * (later == "value")
        one.transfers.sweep()
        assert one.arena.allocated == 0 and one.transfers.budget.held["batches"] == 0
    gc.collect()
    assert device.used == 0


class _FetchFails(FakeDevice):
    def fetch(self, tensor: torch.Tensor, event: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")


def test_a_batch_that_cannot_leave_stays() -> None:
    nbytes = rows_bytes(layout(), ROWS)
    device = _FetchFails(capacity=2 * nbytes)
    with bench(device) as one:
        held = one.take(one.load(1))
        one.submitted = 2
        behind = one.load(3)
        one.issued(behind)
        one.submitted = 1
        with pytest.raises(torch.OutOfMemoryError, match="while a batch was loaded"):
            one.take(one.load(2))
        one.check(one.take(behind), 3)
        one.check(held, 1)
        device.finish()
        one.transfers.sweep()
        assert one.wrong == [] and one.arena.allocated == 0 and one.transfers.stats()["unloaded"] == 0


def test_a_batch_that_nobody_wants_any_more_while_it_leaves_frees_what_it_took() -> None:
    nbytes = rows_bytes(layout(), ROWS)
    device = FakeDevice(capacity=2 * nbytes)
    with bench(device) as one:
        held = one.take(one.load(1))
        one.submitted = 2
        behind = one.load(3)
        one.issued(behind)
        unload = behind.unload

        def left_meanwhile(port: Any) -> None:
            unload(port)
            one.transfers.leave(behind)

        behind.unload = left_meanwhile  # type: ignore[method-assign]
        one.submitted = 1
        one.check(one.take(one.load(2)), 2)
        one.check(held, 1)
        device.finish()
        one.transfers.sweep()
        assert one.wrong == [] and one.arena.allocated == 0 and one.transfers.budget.held["batches"] == 0


def test_for_a_batch_that_the_consumer_waits_for_no_more_nothing_leaves() -> None:
    """It has been told of a time-out, say, and may be taking the next one at this very moment."""
    nbytes = rows_bytes(layout(), ROWS)
    device = FakeDevice(capacity=2 * nbytes)
    with bench(device) as one:
        held = one.take(one.load(1))
        one.submitted = 2
        due = one.load(3)
        one.issued(due)
        one.transfers.expect(due.order)
        one.submitted = 1
        one.issued(one.load(2))
        assert due.issued and one.transfers.stats()["unloaded"] == 0
        one.check(one.take(due), 3)
        one.check(held, 1)
        device.finish()
        assert one.wrong == []


def test_a_batch_that_comes_later_keeps_nothing_of_what_was_loaded_of_it() -> None:
    """One of its two tensors found memory, which the batch that is due needs."""
    device, seen = FakeDevice(capacity=1000), []
    with bench(device) as one:
        later = ValueLoad(lambda: (torch.zeros(200), torch.full((75,), 2.0)), 8)
        one.submit(later, 1)
        assert wait_until(lambda: one.transfers.stats()["short_of_memory"])
        due = ValueLoad(lambda: torch.ones(100), 8)
        one.submit(due, 0)
        device.read(one.take(due), lambda tensor: seen.append(tensor.unique().tolist()))
        device.capacity = 2000
        device.read(one.take(later)[1], lambda tensor: seen.append(tensor.unique().tolist()))
        device.finish()
    assert seen == [[1.0], [2.0]]


def test_what_was_loaded_of_a_batch_that_fails_is_free_again_at_once() -> None:
    device = FakeDevice(capacity=1000)
    with bench(device) as one:
        load = ValueLoad(lambda: (torch.zeros(200), torch.zeros(100)), 8)
        one.submit(load)
        one.issued(load)
        assert load.error is not None and device.used == 0


def test_a_batch_waits_for_samples_that_an_executor_is_slow_to_let_go_of() -> None:
    """On a busy machine a micro-batch takes as long as it takes: who waits is asked for room again and again."""
    nbytes = rows_bytes(layout(), ROWS)
    device, asked = FakeDevice(capacity=nbytes + 100), 0
    with bench(device) as one:
        with device.running(device.stream()):
            making = [device.empty(nbytes // 2)]
        one.transfers.budget.take("samples", nbytes // 2)
        load = one.load(1)

        def look() -> bool:
            nonlocal asked
            if one.transfers.wants_room:
                asked += 1
                if asked == 40:
                    making.clear()
                    one.transfers.budget.give("samples", nbytes // 2)
                one.transfers.room_made()
            return load.issued

        assert wait_until(look)
        one.check(one.take(load), 1)
        assert one.wrong == [] and asked >= 40


class _Counts(FakeDevice):
    """Counts how often it is asked for memory."""

    asked = 0

    def empty(self, nbytes: int) -> torch.Tensor:
        self.asked += 1
        return super().empty(nbytes)


@pytest.mark.parametrize("how", ["closed", "left"])
def test_a_batch_that_nobody_waits_for_any_more_is_given_up(how: str) -> None:
    """Samples stay on the device, so that it would be tried for long."""
    device = _Counts(capacity=100)
    with bench(device) as one:
        one.transfers.budget.take("samples", 50)
        load = one.load(1)
        assert wait_until(lambda: one.transfers.wants_room)
        before = device.asked
        if how == "left":
            one.transfers.leave(load)
            assert wait_until(lambda: one.arena.allocated == 0)
        else:
            one.transfers.close()
        assert device.asked <= before + 1


def test_the_next_batch_of_a_device_that_is_not_due_yet_waits_for_memory_until_it_is() -> None:
    """Before it the consumer takes one from another device, and what it has of this one is then free."""
    nbytes = rows_bytes(layout(), ROWS)
    device = FakeDevice(capacity=nbytes + nbytes // 2)
    with bench(device) as one:
        one.transfers.expect(0, 0)
        held = one.take(one.load(1))
        one.transfers.expect(1, 2)
        one.submitted = 2
        load = one.load(2)
        assert wait_until(lambda: one.transfers.wants_room)
        one.transfers.room_made()  # the consumer waits for the other device's
        assert wait_until(lambda: load.issued or load in one.transfers._queue)
        one.check(held, 1)
        del held
        gc.collect()
        one.transfers.expect(2, 2)
        one.check(one.take(load), 2)
        device.finish()
        assert one.wrong == []


class _Meanwhile(FakeDevice):
    """Something happens when it has no memory."""

    def happens(self) -> None:
        pass

    def empty(self, nbytes: int) -> torch.Tensor:
        try:
            return super().empty(nbytes)
        except torch.OutOfMemoryError:
            self.happens()
            raise


def test_a_batch_that_becomes_due_while_it_is_tried_is_tried_once_more() -> None:
    """It had no memory for what the consumer has let go of since then."""
    nbytes = rows_bytes(layout(), ROWS)
    device = _Meanwhile(capacity=nbytes + nbytes // 2)
    with bench(device) as one:
        one.transfers.expect(0, 0)
        held = [one.take(one.load(1))]
        one.transfers.expect(1, 2)
        one.submitted = 2
        load = one.load(2)
        assert wait_until(lambda: one.transfers.wants_room)
        device.happens = lambda: one.transfers.expect(2, 2)  # type: ignore[method-assign]
        one.transfers.room_made()

        def look() -> bool:
            if one.transfers.wants_room:
                held.clear()
                gc.collect()
                one.transfers.room_made()
            return load.issued

        assert wait_until(lambda: one.transfers._due == 2) and wait_until(look)
        one.check(one.take(load), 2)
        device.finish()
        assert one.wrong == []


@pytest.mark.parametrize("order", ORDERS)
def test_samples_that_another_device_needs_the_memory_of_leave_it_before_their_batch_is_loaded(order: Order) -> None:
    """One batch is under way, the other waits for room in the budget."""
    device = FakeDevice(order)
    maker = FakeDevice(order, beside=[device])
    with bench(device, limit=1) as one:
        first, second = one.load(1, (1, 2, 6), maker), one.load(2, (0, 3), maker)
        one.issued(first)
        one.transfers.let_go_for_others()
        gc.collect()
        assert maker.used == 0 and not second.issued
        one.check(one.take(first), 1)
        one.check(one.take(second), 2)
        device.finish()
        maker.finish()
        assert one.wrong == []


def test_a_log_that_raises_does_not_let_the_consumer_wait_for_ever() -> None:
    class Wrong(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            raise LookupError(record.getMessage())

    wrong = Wrong()
    LOGGER.addFilter(wrong)
    try:
        with bench(FakeDevice(capacity=100)) as one:
            with pytest.raises(LookupError, match="has no memory for a batch"):
                one.take(one.load(1))
            one.device.capacity = 1 << 20
            one.check(one.take(one.load(2)), 2)
            one.transfers.sweep()
            assert one.wrong == [] and one.arena.allocated == 0
    finally:
        LOGGER.removeFilter(wrong)
