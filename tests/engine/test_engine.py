"""The engine: runs that are given up, overlapping epochs, memory that comes back, and event logs that replay."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu import DataLoader
from minato_gpu.scheduling import replay
from minato_gpu.scheduling.messages import LaneOpened
from tests.contracts.datasets import Made
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
    """A data set: every seventh key takes far more work than the others; some keys wait for ``gate``."""

    def __init__(self, make: Any = row, gated: frozenset[int] = frozenset()) -> None:
        self.make = make
        self.gated = gated
        self.gate = _FORK.Event()

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, key: int) -> Any:
        assert key not in self.gated or self.gate.wait(30)
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
    "rows, bounded": {"in_order": False, "max_lateness": 2},
    "joined by workers": {"collate_fn": list},
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


class Counted(Slow):
    """Counts the samples that were begun."""

    def __init__(self, gated: frozenset[int] = frozenset()) -> None:
        super().__init__(gated=gated)
        self.begun = _FORK.Value("i", 0)

    def __getitem__(self, key: int) -> Any:
        with self.begun.get_lock():
            self.begun.value += 1
        return super().__getitem__(key)


# --- while the consumer trains -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("mode", _MODES.values(), ids=_MODES.keys())
def test_the_window_moves_on_while_the_consumer_is_away(mode: dict[str, Any], kind: str) -> None:
    """A batch that lay ready is taken; what follows happens without another call. The workers are idle by then."""
    dataset = Counted()
    batches = iter(loader(dataset, mode, kind))
    for taken in range(1, 6):
        next(batches)
        assert wait_until(lambda taken=taken: dataset.begun.value == 4 * (taken + 4))  # type: ignore[misc]


@pytest.mark.parametrize("kind", _KINDS)
def test_the_window_moves_on_after_busy_workers_report(kind: str) -> None:
    """The batch is taken while every worker is at a sample: the first that reports wakes the pump."""
    dataset = Counted(gated=frozenset({10, 11}))
    batches = iter(loader(dataset, {}, kind))
    next(batches)
    assert wait_until(lambda: dataset.begun.value >= 12)
    next(batches)
    dataset.gate.set()
    assert wait_until(lambda: dataset.begun.value == 24)


# --- runs that are given up ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("mode", _MODES.values(), ids=_MODES.keys())
def test_leaving_epochs_again_and_again_disturbs_no_later_one(mode: dict[str, Any], kind: str) -> None:
    """Breaks after 0 to 4 batches; kept batches of given-up epochs stay as they are; then a whole epoch."""
    sampler = Fresh(60)
    one = loader(Slow(uneven if "collate_fn" in mode else row), mode, kind, sampler=sampler)
    kept: list[tuple[Any, list[int]]] = []
    for leave in [0, 1, 3, 0, 2, 4, 1, 1, 0, 3]:
        for number, batch in enumerate(one):
            keys = keys_of(batch)
            assert {key // 1000 for key in keys} == {sampler.epoch}
            if number % 2 == 0:
                kept.append((batch, keys))
            if number == leave:
                break
    whole = [key for batch in one for key in keys_of(batch)]
    expected = range(1000 * sampler.epoch, 1000 * sampler.epoch + 60)
    assert (sorted(whole) if mode.get("in_order") is False else whole) == list(expected)
    for batch, keys in kept:
        assert keys_of(batch) == keys, "a batch of a given-up epoch was overwritten"


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


# --- memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [_MODES["rows"], _MODES["rows, bounded"]], ids=["in order", "bounded"])
def test_every_block_is_free_after_an_epoch(mode: dict[str, Any]) -> None:
    one = loader(Slow(), mode, sampler=Fresh(62))
    for _ in range(3):
        kept = [batch[1] for batch in one]
        assert memory_in_use(one) >= len(kept) * 4 * row(0).nbytes
        del kept
        gc.collect()
        assert memory_in_use(one) == 0
        assert one.stats()["bytes_in_flight"] == 0


def test_the_memory_of_objects_is_used_again() -> None:
    """Workers get their blocks back while batches are consumed: their arenas do not grow with the epoch."""
    one = loader(Slow(lambda key: torch.zeros(50_000 + key % 3)), {"collate_fn": list}, sampler=Fresh(200))
    for _ in one:
        pass
    arenas = one._session.engine._links.arenas
    assert sum(os.fstat(arena.fd).st_blocks * 512 for arena in arenas) < 100 * 200_000


# --- epochs that overlap -------------------------------------------------------------------------------------


_TEN: Any = range(10)


def _two_ways(make: Any, epochs: int) -> tuple[list[Any], list[Any], Any]:
    torch.manual_seed(11)
    overlapping = make(persistent_workers=True, epochs=epochs + 1)
    ahead = [batch.tolist() for _ in range(epochs) for batch in overlapping] + [torch.rand(()).item()]
    torch.manual_seed(11)
    seed_once = make(num_workers=0)
    plain = []
    for number in range(epochs):
        state = torch.get_rng_state()
        iterator = iter(seed_once)
        if number:  # persistent workers draw a seed when they start, no more
            torch.set_rng_state(state)
            iterator._sampler_iter = iter(seed_once._index_sampler)
        plain += [batch.tolist() for batch in iterator]
    return ahead, [*plain, torch.rand(()).item()], overlapping


@pytest.mark.parametrize("shuffle", [False, True])
def test_overlapping_epochs_have_the_order_of_separate_ones(shuffle: bool) -> None:
    """Ten short shuffled epochs from the global generator: the same batches, and the generator ends where it would."""
    arguments = {"shuffle": shuffle, "num_workers": 2, "prefetch_factor": 4}
    ahead, plain, used = _two_ways(lambda **more: DataLoader(_TEN, 3, **{**arguments, **_fit(more)}), 10)
    assert ahead == plain
    assert used.stats()["speculation"] == {"epochs_prepared": 10, "epochs_discarded": 0}


def _fit(more: dict[str, Any]) -> dict[str, Any]:
    return {**more, "prefetch_factor": None} if more.get("num_workers") == 0 else more


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


# --- event logs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", _MODES.values(), ids=_MODES.keys())
def test_recorded_events_replay_to_the_same_instructions(tmp_path: Path, mode: dict[str, Any]) -> None:
    """Slow samples, a failing one, epochs given up and whole ones; a changed line is noticed."""

    def make(key: int) -> Any:
        if key == 2033:
            raise ValueError("broken")
        return row(key)

    one = loader(Slow(make), mode, sampler=Fresh(60))
    one.record_events(tmp_path / "events.jsonl")
    for leave in (2, 100, 100, 0, 100):
        iterator = iter(one)
        for number in range(100):
            try:
                next(iterator)
            except ValueError:
                continue
            except StopIteration:
                break
            if number == leave:
                break
        del iterator  # a second one beside it would have an engine of its own
    one._session.engine.close()
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    starts = [at for at, line in enumerate(lines) if line.startswith('{"policy"')]
    assert len(starts) >= 4
    kinds, known = set(), []
    for begin, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        assert replay.verify(lines[begin:end]) == end - begin - 1
        for line in lines[begin + 1 : end]:
            event, instructions = replay.parse(line)
            assert replay.line(event, instructions) == line
            kinds |= {type(message).__name__ for message in (event, *instructions)}
            known += [event.known] if isinstance(event, LaneOpened) else []
    assert {"Admitted", "Finished", "Delivered", "Ended", "LaneOpened", "Dispatch", "Compose"} <= kinds
    assert known[0] is None and known[-1] is not None and known[-1].samples > 60, "what earlier runs have learnt"
    first = lines[starts[0] : starts[1]]
    at = next(number for number, line in enumerate(first) if '["Compose"' in line)
    event, instructions = replay.parse(first[at])
    with pytest.raises(replay.ReplayMismatch, match=f"event {at} "):
        replay.verify([*first[:at], replay.line(event, instructions[:-1])])


def test_a_thread_of_the_users_waits_for_the_end_whatever_its_name() -> None:
    loader: Any = DataLoader(Slow(), 4, sampler=range(40), num_workers=1, worker_kind="thread")  # type: ignore[arg-type]
    iterator = iter(loader)
    next(iterator)
    engine, ended_by = iterator._engine, []
    engine.on_close = lambda: ended_by.append(threading.current_thread())
    thread = threading.Thread(target=engine.close, name="minato-mine")
    thread.start()
    thread.join()
    assert wait_until(lambda: ended_by)
    assert ended_by == [thread]


def test_the_end_from_a_thread_that_it_waits_for() -> None:
    """As where the garbage collector runs there: it is left to another thread."""
    engines: list[Any] = []
    gate = threading.Event()

    class Ending(Slow):
        def __getitem__(self, key: int) -> Any:
            gate.wait()
            if key == 5:
                engines[0].close()
            return super().__getitem__(key)

    loader: Any = DataLoader(Ending(), 4, sampler=range(40), num_workers=1, worker_kind="thread")  # type: ignore[arg-type]
    iterator = iter(loader)
    engines.append(iterator._engine)
    gate.set()
    assert wait_until(lambda: not engines[0]._thread.is_alive())


def _dropped(held: list[Any]) -> None:
    held.clear()
    gc.collect()


@pytest.mark.parametrize("kind", _KINDS)
def test_a_fork_that_drops_its_copy_of_an_iterator_takes_nothing_from_its_parent(kind: str) -> None:
    numbers: Any = list(range(200))
    loader: Any = DataLoader(numbers, 4, num_workers=2, worker_kind=kind)
    held = [iter(loader)]
    got = next(held[0]).tolist()
    child = _FORK.Process(target=_dropped, args=(held,))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    got += [key for batch in held.pop() for key in batch.tolist()]
    assert got == list(range(200))


def test_what_was_prepared_ahead_is_no_busy_time_of_its_epoch() -> None:
    """All of the second epoch is ready before it begins, and it takes far less time than that took."""
    made = _FORK.Value("i", 0)

    def make(index: int) -> Any:
        hashlib.pbkdf2_hmac("sha256", b"", bytes([index]), 10_000)
        with made.get_lock():
            made.value += 1
        return torch.tensor(index)

    loader = DataLoader(Made(8, make), 2, num_workers=1, persistent_workers=True, prefetch_factor=8, epochs=2)
    list(loader)
    assert wait_until(lambda: made.value == 16)
    list(loader)
    lane = loader.stats()["lanes"]["cpu"]
    assert lane["samples"] == 8 and lane["busy_share"] <= 1
