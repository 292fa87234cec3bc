"""The engine: runs that are given up, overlapping epochs, and memory that comes back."""

from __future__ import annotations

import contextlib
import errno
import gc
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from minato_gpu import DataLoader
from minato_gpu.engine.parts import Parts
from minato_gpu.engine.pump import Pump
from minato_gpu.samples import TicketId
from minato_gpu.scheduling.messages import Awaited
from minato_gpu.window.records import Record, Window
from tests.contracts.datasets import Made, Sourced
from tests.lanes.harness import open_links
from tests.support import leaks
from tests.support.tickets import positions, span
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("no_leaks")

_FORK = multiprocessing.get_context("fork")
_KINDS = ["process", "thread"]


def row(key: int) -> Any:
    """Stacked in place; torn or foreign rows show."""
    return np.full(300, key, np.int64)


def uneven(key: int) -> Any:
    """Travels as an object."""
    return {"key": key, "data": torch.full((key % 5 + 1,), key)}


class Fresh:
    """A sampler: every epoch has keys of its own, so that a sample of another epoch shows."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = -1

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(range(1000 * self.epoch, 1000 * self.epoch + self.length))


class Slow:
    """A data set: every seventh key takes far more work than the others; some keys wait for ``gate``.

    ``begun``: how many samples were."""

    def __init__(self, make: Any = row, gated: frozenset[int] = frozenset()) -> None:
        self.make = make
        self.gated = gated
        self.gate = _FORK.Event()
        self.begun = _FORK.Value("i", 0)

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, key: int) -> Any:
        with self.begun.get_lock():
            self.begun.value += 1
        assert key not in self.gated or self.gate.wait(60)
        assert sum(range(60_000 if key % 7 == 3 else 10)) >= 0
        return self.make(key)


def keys_of(batch: Any) -> list[int]:
    """The keys of the samples in a batch, all of whose bytes are checked."""
    if isinstance(batch, torch.Tensor):
        assert bool((batch == batch[:, :1]).all()), "a row was torn"
        return [int(key) for key in batch[:, 0]]
    for sample in batch:
        assert sample["data"].tolist() == [sample["key"]] * (sample["key"] % 5 + 1)
    return [sample["key"] for sample in batch]


_MODES: dict[str, dict[str, Any]] = {
    "rows": {},
    "joined by workers, bounded": {"collate_fn": list, "in_order": False, "max_lateness": 2},
}


def loader(dataset: Any, mode: dict[str, Any], kind: str = "process", **more: Any) -> Any:
    """Two persistent workers, batches of four."""
    arguments = {"num_workers": 2, "persistent_workers": True, "worker_kind": kind, **mode, **more}
    return DataLoader(dataset, 4, **arguments)


def memory_in_use(of: Any) -> int:
    """Bytes of the engine's arena that are not free, once reports of earlier runs have been taken in."""
    engine = of._session.engine
    engine.pump.receive()
    engine.assembly.holdings.reclaim()
    return int(engine._links.engine_arena.allocated)


@pytest.mark.parametrize("kind", _KINDS)
def test_the_window_moves_on_after_busy_workers_report(kind: str) -> None:
    """The batch is taken while every worker is at a sample: the first that reports wakes the pump."""
    dataset = Slow(gated=frozenset({10, 11}))
    batches = iter(loader(dataset, {}, kind, prefetch_factor=2))  # else the window may grow
    next(batches)
    assert wait_until(lambda: dataset.begun.value >= 12)
    next(batches)
    dataset.gate.set()
    assert wait_until(lambda: dataset.begun.value == 24)


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("mode", _MODES.values(), ids=_MODES.keys())
def test_a_sample_that_finishes_after_its_run_writes_into_no_new_batch(mode: dict[str, Any], kind: str) -> None:
    """One worker hangs in the old epoch while the other prepares the new one; it lets go when batches are there."""
    dataset = Slow(uneven if "collate_fn" in mode else row, gated=frozenset([9]))
    sampler = Fresh(40)
    one = loader(dataset, mode, kind, sampler=sampler, prefetch_factor=4)
    dataset.gate.set()
    list(one)  # the layout is known from here on
    sampler.epoch = -1
    dataset.gate.clear()
    iterator = iter(one)
    next(iterator)
    board = one._session.engine._links.board
    assert wait_until(lambda: any(board.words[board.row(worker)] > 0 for worker in range(2)))
    del iterator
    iterator = iter(one)
    batches = [next(iterator) for _ in range(5)]
    before = [keys_of(batch) for batch in batches]
    dataset.gate.set()
    batches += list(iterator)
    keys = [key for batch in batches for key in keys_of(batch)]
    assert [keys_of(batch) for batch in batches[:5]] == before
    assert sorted(keys) == list(range(1000, 1040))


def test_the_consumer_sleeps_where_what_is_ready_cannot_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks of other places may be ready, of leases that nobody asks for; one more that gets ready wakes it."""
    with open_links() as links:
        own, others = links.completions.reserve(4), links.completions.reserve(4)
        window, lane = Window(), SimpleNamespace(name="cpu", receive=list, sleep=lambda *, every_task: None)
        record = Record(0, TicketId(0), positions(0, 4), [0, 1, 2, 3], None)
        record.marks = own
        window.admit(record)
        scheduler: Any = SimpleNamespace(awaited=Awaited(span(0, 4), 1, False), lane_costs={}, flights={})
        assembly: Any = SimpleNamespace(holdings=None, loading=None, samples=None, window=window)
        pump = Pump(Parts(links, {"cpu": cast(Any, lane)}, assembly))
        pump.run.scheduler = scheduler
        links.bell.publish(others, [1e-3] * 2, 0.0, 2e-3, 0, None)
        pump.receive()
        assert not pump.listen()
        links.bell.publish(own, [1e-3], 0.0, 1e-3, 0, None)
        assert pump.listen()


def test_the_memory_of_given_up_runs_comes_back() -> None:
    dataset = Slow(gated=frozenset([2]))
    sampler = Fresh(40)
    one = loader(dataset, {}, sampler=sampler)
    dataset.gate.set()
    list(one)
    for _ in range(3):
        sampler.epoch = -1
        dataset.gate.clear()
        iter(one)
        iter(one)  # while key 2 of the run before hangs, or was never begun
        dataset.gate.set()
        list(one)
    assert wait_until(lambda: memory_in_use(one) == 0), f"{memory_in_use(one)} bytes were not given back"
    assert not one._session.engine.pump._abandoned


_TEN: Any = range(10)


def test_a_loop_that_draws_between_epochs_gets_pytorchs_order() -> None:
    """The guess is discarded, counted, and not made again."""
    one: Any = DataLoader(_TEN, 3, shuffle=True, num_workers=2, epochs=4, prefetch_factor=4)
    torch.manual_seed(5)
    orders = []
    for _ in range(4):
        orders.append([key for batch in one for key in batch.tolist()])
        torch.rand(3)
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert one.stats()["speculation"] == {"epochs_prepared": 1, "epochs_discarded": 1}


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it is asked whether that lives
def test_what_the_pump_thread_raises_is_kept_for_the_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    gated: Any = Slow(int, gated=frozenset([30]))
    loader: Any = DataLoader(gated, 4, sampler=range(40), num_workers=1, worker_kind="thread")
    iterator = iter(loader)
    got = next(iterator).tolist()
    engine, raised = iterator._engine, []

    def receive() -> None:
        raised.append(OSError("cannot be taken in"))
        raise raised[-1]

    with monkeypatch.context() as patch:
        patch.setattr(engine.pump, "receive", receive)
        engine._leave_due()
        assert wait_until(lambda: raised)
        with engine._lock:
            pass  # it has been kept
    assert engine._thread.is_alive()
    with pytest.raises(OSError, match="cannot be taken in"):  # at the latest where it must wait
        got.extend(key for batch in iterator for key in batch.tolist())
    gated.gate.set()
    got += [key for batch in iterator for key in batch.tolist()]
    assert got == list(range(40))


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [(Made, {}), (Made, {"worker_kind": "thread"}), (Sourced, {})],
    ids=["process", "thread", "source"],
)
def test_where_descriptors_run_out_it_is_said_what_to_do(kind: type[Made], arguments: dict[str, Any]) -> None:
    """Whichever is the first that cannot be had, none stays open (but for two pipes that CPython's own fork leaves)."""
    loader: Any = DataLoader(kind(8, int), 2, num_workers=2, **arguments)
    list(loader)  # what is made once is there
    before, told = _opened(), dict[str, int | None]()
    for limit in range(3, 1000):
        try:
            with leaks.descriptors_below(limit):
                iterator = iter(loader)
            break
        except OSError as error:
            told[str(error)] = error.errno
        gc.collect()
        stay = dict(_opened().items() - before.items())
        assert all(link.startswith("pipe:") for link in stay.values()), stay
        for number in stay:
            os.close(number)
    assert len(list(iterator)) == 4
    assert {*told.values()} == {errno.EMFILE}
    assert all("Too many open files" in text and "resource.setrlimit" in text for text in told)
    assert any("num_workers=2 worker processes" in text for text in told) == (not arguments)


def _opened() -> dict[int, str]:
    """What this process has open, by number."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder itself
            found[int(entry.name)] = str(entry.readlink())
    return found


def test_a_run_begins_with_what_earlier_ones_have_learnt() -> None:
    one = loader(Slow(), {}, sampler=Fresh(400))
    next(iterator := iter(one))
    del iterator  # left in the middle: the next epoch is another run
    list(one)
    learnt = one._session.engine.pump.run.scheduler.lane_costs["cpu"].samples
    next(iterator := iter(one))
    del iterator
    next(iterator := iter(one))
    assert one._session.engine.pump.run.scheduler.lane_costs["cpu"].samples > learnt >= 400
    del iterator
