"""Workers: their information, their start function, what lives in them, persistent ones, and how they start."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing
from torch.utils.data import get_worker_info

from tests.contracts.datasets import Made
from tests.support.raising import error_of
from tests.support.waiting import wait_until
from tests.torch_semantics.datasets import Numbers, ProcessIds, Stream, as_lists, keep, numbers_in


def _described(index: int) -> Any:
    info = get_worker_info()
    return None if info is None else (info.id, info.num_workers, os.getpid(), type(info.seed), info.dataset)


def test_no_worker_info_in_the_main_process(loader_class: Any) -> None:
    assert get_worker_info() is None
    assert list(loader_class(Made(1, _described), collate_fn=keep)) == [[None]]
    assert get_worker_info() is None


def _scheduled(index: int) -> tuple[int, int]:
    return os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)


def test_workers_have_as_much_of_the_machine_as_the_program(loader_class: Any) -> None:
    """Beside other users' processes they would get next to nothing else."""
    samples = [one for batch in loader_class(Made(4, _scheduled), 2, num_workers=1, collate_fn=keep) for one in batch]
    assert samples == [_scheduled(0)] * 4


def test_worker_info(loader_class: Any) -> None:
    data = Made(24, lambda index: (*_described(index)[:4], _described(index)[4] is data))
    samples = [sample for batch in loader_class(data, 2, num_workers=3, collate_fn=keep) for sample in batch]
    assert {identity for identity, *_ in samples} <= {0, 1, 2}
    assert {(count, kind, own) for _, count, _, kind, own in samples} == {(3, int, True)}
    pids: dict[int, set[int]] = {}
    for identity, _, pid, *_ in samples:
        pids.setdefault(identity, set()).add(pid)
    assert all(len(found) == 1 for found in pids.values())
    assert os.getpid() not in set.union(*pids.values())
    assert get_worker_info() is None


def _change_worker_info(worker: int) -> None:
    info: Any = get_worker_info()
    for name in ("id", "num_workers", "seed", "dataset", "other"):
        try:
            setattr(info, name, 1)
        except (dataclasses.FrozenInstanceError, AttributeError, TypeError, RuntimeError):
            continue
        raise AssertionError(f"{name} could be set")


def test_worker_info_cannot_be_changed(loader_class: Any) -> None:
    assert len(list(loader_class(Numbers(2), num_workers=1, worker_init_fn=_change_worker_info))) == 2


def test_start_function_runs_once_in_every_worker(loader_class: Any) -> None:
    """Also in a worker that never gets a sample."""
    calls: Any = multiprocessing.get_context("fork").Array("i", 3)

    def begin(worker: int) -> None:
        with calls.get_lock():
            calls[worker] += 1

    iterator = iter(loader_class(Numbers(1), num_workers=3, worker_init_fn=begin))
    assert wait_until(lambda: list(calls) == [1, 1, 1])
    assert [int(batch) for batch in iterator] == [0]
    assert list(calls) == [1, 1, 1]


def test_start_function_is_not_called_without_workers(loader_class: Any) -> None:
    def begin(worker: int) -> None:
        raise AssertionError("called")

    assert len(list(loader_class(Numbers(2), worker_init_fn=begin))) == 2


def test_seed_set_in_the_start_function_is_seen_by_the_data_set(loader_class: Any) -> None:
    data = Made(8, lambda index: torch.tensor(torch.initial_seed()))
    for persistent in (False, True):
        loader = loader_class(
            data,
            2,
            num_workers=2,
            worker_init_fn=lambda worker: torch.manual_seed(12345),
            persistent_workers=persistent,
        )
        for _ in range(2):
            assert {int(seed) for batch in loader for seed in batch} == {12345}


def test_start_function_runs_after_seeding(loader_class: Any) -> None:
    def check(worker: int) -> None:
        info = get_worker_info()
        assert info is not None and torch.initial_seed() == info.seed
        assert info.id == worker

    assert len(list(loader_class(Numbers(4), num_workers=2, worker_init_fn=check))) == 4


def test_start_function_may_change_the_workers_data_set(loader_class: Any) -> None:
    def begin(worker: int) -> None:
        info: Any = get_worker_info()
        info.dataset.make = lambda index: torch.tensor(index + 100)

    data = Made(4, torch.tensor)
    loader = loader_class(data, num_workers=2, worker_init_fn=begin)
    assert [int(batch) for batch in loader] == [100, 101, 102, 103]
    assert int(data[0]) == 0


def test_collation_runs_in_the_workers(loader_class: Any, num_workers: int) -> None:
    def collate(samples: list[Any]) -> tuple[int, bool, list[int]]:
        return os.getpid(), get_worker_info() is None, [int(sample) for sample in samples]

    batches = list(loader_class(Numbers(5), 2, num_workers=num_workers, collate_fn=collate))
    assert [numbers for *_, numbers in batches] == [[0, 1], [2, 3], [4]]
    assert {(pid == os.getpid(), in_main) for pid, in_main, _ in batches} == {(num_workers == 0,) * 2}


def test_workers_use_one_torch_thread(loader_class: Any) -> None:
    data = Made(4, lambda index: torch.tensor(torch.get_num_threads()))
    assert {int(batch) for batch in loader_class(data, num_workers=2)} == {1}


def test_affinity_set_in_the_start_function_holds(loader_class: Any) -> None:
    core = min(os.sched_getaffinity(0))
    data = Made(4, lambda index: torch.tensor(sorted(os.sched_getaffinity(0))))
    loader = loader_class(data, num_workers=2, worker_init_fn=lambda worker: os.sched_setaffinity(0, {core}))
    assert {tuple(batch[0].tolist()) for batch in loader} == {(core,)}


def _pids(batches: Any) -> set[int]:
    return {int(pid) for batch in batches for pid in batch[:, 1]}


def test_persistent_workers_stay(loader_class: Any) -> None:
    """The same processes serve every epoch; two workers can appear at most, over all epochs together."""
    loader = loader_class(ProcessIds(12), 2, num_workers=2, persistent_workers=True)
    assert len(set.union(*(_pids(loader) for _ in range(4)))) <= 2
    other = loader_class(ProcessIds(12), 2, num_workers=2)
    assert not _pids(other) & _pids(other)


class _Remembering(Numbers):
    """Counts in each worker's copy how many samples it has made."""

    made = 0

    def __getitem__(self, index: int) -> Any:
        self.made += 1
        return torch.tensor([self.made, self.length])


@pytest.mark.parametrize("persistent", [False, True])
def test_state_of_the_workers_copy(loader_class: Any, persistent: bool) -> None:
    data = _Remembering(3)
    loader = loader_class(data, num_workers=1, persistent_workers=persistent)
    counts = [[int(batch[0, 0]) for batch in loader] for _ in range(2)]
    assert counts == [[1, 2, 3], [4, 5, 6] if persistent else [1, 2, 3]]
    assert data.made == 0


class _Scheduled(Numbers):
    """Samples are what the program says between epochs, as a schedule of augmentations does it."""

    def __init__(self) -> None:
        super().__init__(8)
        self.now = torch.zeros((), dtype=torch.int64).share_memory_()

    def __getitem__(self, index: int) -> Any:
        return self.now.clone()


def test_what_changes_between_epochs_reaches_persistent_workers(loader_class: Any) -> None:
    """A counter in shared memory, and how many samples there are."""
    data = _Scheduled()
    loader = loader_class(data, 2, num_workers=2, persistent_workers=True)
    for epoch, length in enumerate((8, 8, 4, 10)):
        data.now.fill_(epoch)
        data.length = length
        assert [int(number) for batch in loader for number in batch] == [epoch] * length


def test_main_process_generators_are_left_alone_by_workers(loader_class: Any) -> None:
    before = (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    data = Made(6, lambda index: [random.random(), float(np.random.rand()), float(torch.rand(()))])
    list(loader_class(data, 2, num_workers=2))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index]


def test_iteration_from_another_thread(loader_class: Any, num_workers: int) -> None:
    received: list[int] = []
    loader = loader_class(Numbers(6), 2, num_workers=num_workers)
    thread = threading.Thread(target=lambda: received.extend(int(n) for batch in loader for n in batch))
    thread.start()
    thread.join()
    assert received == list(range(6))


# --- contexts, by name and as objects: spawned workers import torch, so there are few of them -------------------


def _begin(worker: int) -> None:
    torch.manual_seed(123)


class _Described(Numbers):
    def __getitem__(self, index: int) -> Any:
        method = multiprocessing.process.current_process()
        return [index, os.getpid(), torch.initial_seed(), type(method).__name__]


@pytest.mark.parametrize(
    ("method", "library"),
    [
        ("fork", None),
        ("forkserver", None),
        ("fork", multiprocessing),
        ("spawn", torch.multiprocessing),
    ],
)
def test_contexts(loader_class: Any, method: str, library: Any) -> None:
    context = method if library is None else library.get_context(method)
    loader = loader_class(
        _Described(6), 3, num_workers=1, multiprocessing_context=context, worker_init_fn=_begin, persistent_workers=True
    )
    assert loader.multiprocessing_context.get_start_method() == method
    for _ in range(2):
        batches = list(loader)
        assert [batch[0].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5]]
        assert all(int(pid) != os.getpid() for batch in batches for pid in batch[1])
        assert {int(seed) for batch in batches for seed in batch[2]} == {123}
        names = {name for batch in batches for name in batch[3]}
        assert names == {{"fork": "ForkProcess", "spawn": "SpawnProcess", "forkserver": "ForkServerProcess"}[method]}


def test_a_stream_in_workers_that_are_not_forked_from_here(loader_class: Any) -> None:
    loader = loader_class(Stream(7), 2, num_workers=2, multiprocessing_context="forkserver")
    assert as_lists(loader) == [[0, 2], [1, 3], [4, 6], [5]]


def test_an_event_of_the_context_reaches_the_workers(loader_class: Any) -> None:
    context = multiprocessing.get_context("fork")
    gate = context.Event()

    def make(index: int) -> Any:
        gate.wait()
        return torch.tensor(index)

    iterator = iter(loader_class(Made(4, make), 2, num_workers=2, multiprocessing_context=context))
    gate.set()
    assert numbers_in(iterator) == [0, 1, 2, 3]


def test_a_data_set_that_cannot_be_pickled_for_spawn(loader_class: Any) -> None:
    loader = loader_class(Made(4, lambda index: index), num_workers=2, multiprocessing_context="spawn")
    with pytest.warns(UserWarning, match="^Got pickle error when attempting to start a worker Process"):
        caught = error_of(Exception, iter, loader)
    assert isinstance(caught, (AttributeError, TypeError, multiprocessing.ProcessError)) or "pickle" in str(caught)
