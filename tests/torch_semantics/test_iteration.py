"""Iterators: their protocol, early ends, several at once, loops in loops, out of order."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.contracts.datasets import Made
from tests.support.leaks import child_pids
from tests.support.raising import error_of
from tests.support.waiting import wait_until
from tests.torch_semantics.datasets import Numbers, ProcessIds, Stream, as_lists, numbers_in


def test_protocol(loader_class: Any, num_workers: int) -> None:
    loader = loader_class(Numbers(5), 2, num_workers=num_workers)
    iterator = iter(loader)
    assert iter(iterator) is iterator
    assert len(iterator) == 3
    assert [batch.tolist() for batch in iterator] == [[0, 1], [2, 3], [4]]
    for _ in range(3):
        error_of(StopIteration, next, iterator)
    assert as_lists(loader) == [[0, 1], [2, 3], [4]]


def test_a_subclass_whose_own_iteration_goes_on(loader_class: Any, num_workers: int) -> None:
    """Published loaders that keep their workers begin anew by ``_get_iterator``, which does not ask ``__iter__``."""

    class Endless(loader_class):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            for _ in range(2):
                yield next(self.going)

        def begin(self) -> None:
            self.going = self._get_iterator()

    loader = Endless(Numbers(6), 2, num_workers=num_workers)
    for _ in range(2):
        loader.begin()
        assert as_lists(loader) == [[0, 1], [2, 3]]
    del loader.going


def test_construction_touches_nothing(loader_class: Any, num_workers: int) -> None:
    def make(index: int) -> Any:
        raise AssertionError("touched")

    before = child_pids()
    loader = loader_class(Made(4, make), num_workers=num_workers)
    assert len(loader) == 4
    assert child_pids() == before


def test_without_workers_samples_are_made_when_asked_for(loader_class: Any) -> None:
    made: list[int] = []

    def make(index: int) -> int:
        made.append(index)
        return index

    iterator = iter(loader_class(Made(6, make), 2))
    assert made == []
    next(iterator)
    assert made == [0, 1]
    next(iterator)
    assert made == [0, 1, 2, 3]


@pytest.mark.parametrize("persistent", [False, True])
def test_early_break_and_reuse(loader_class: Any, persistent: bool) -> None:
    loader = loader_class(Numbers(100), 2, num_workers=2, persistent_workers=persistent)
    for stop in (1, 3, 10):
        assert numbers_in(itertools.islice(loader, stop)) == list(range(2 * stop))
    assert numbers_in(loader) == list(range(100))


def _children() -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in child_pids()]


def _workers(batches: Any) -> list[psutil.Process]:
    assert next(batches) is not None
    return _children()


def test_deleting_the_iterator_ends_its_workers(loader_class: Any) -> None:
    loader = loader_class(ProcessIds(1000), 2, num_workers=2)
    iterator = iter(loader)
    workers = _workers(iterator)
    assert len(workers) >= 2
    del iterator
    assert wait_until(lambda: not any(worker.is_running() for worker in workers))


def test_the_workers_end_with_the_epoch(loader_class: Any) -> None:
    iterator = iter(loader_class(ProcessIds(10), 2, num_workers=2))
    workers = _workers(iterator)
    list(iterator)
    assert wait_until(lambda: not any(worker.is_running() for worker in workers))


def test_an_exception_in_the_loop_ends_the_workers(loader_class: Any) -> None:
    workers: list[psutil.Process] = []

    def loop() -> None:
        for _ in loader_class(ProcessIds(1000), 2, num_workers=2):
            workers.extend(_children())
            raise ArithmeticError("in the loop")

    error_of(ArithmeticError, loop)
    assert workers and wait_until(lambda: not any(worker.is_running() for worker in workers))


def test_two_iterators_of_one_loader(loader_class: Any, num_workers: int) -> None:
    loader = loader_class(Numbers(9), 2, num_workers=num_workers)
    for one, two in zip(loader, loader, strict=True):
        assert one.tolist() == two.tolist()
    first, second = iter(loader), iter(loader)
    head = next(first).tolist()
    assert as_lists(second) == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
    assert [head, *as_lists(first)] == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]


def test_persistent_workers_have_one_iterator(loader_class: Any) -> None:
    loader = loader_class(Numbers(9), 2, num_workers=1, persistent_workers=True)
    list(loader)
    assert as_lists(loader) == as_lists(loader)


def test_a_loop_in_a_loop(loader_class: Any) -> None:
    outer = loader_class(Numbers(3), num_workers=1)
    inner = loader_class(Numbers(4), 2, num_workers=1)
    seen = [(int(one), two.tolist()) for one in outer for two in inner]
    assert seen == [(one, two) for one in range(3) for two in ([0, 1], [2, 3])]


def test_a_loader_inside_a_data_set(loader_class: Any, num_workers: int) -> None:
    inner = loader_class(Numbers(4), 2)
    data = Made(3, lambda index: torch.stack([batch.sum() + index for batch in inner]))
    assert as_lists(loader_class(data, num_workers=num_workers)) == [[[1 + i, 5 + i]] for i in range(3)]


class _Chained(IterableDataset[Any]):
    """A stream of another loader's batches."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)


def test_a_loader_as_the_stream_of_another(loader_class: Any, num_workers: int) -> None:
    inner = loader_class(Numbers(4), 2)
    expected = [[[0, 1], [2, 3]]] * max(1, num_workers)
    assert as_lists(loader_class(_Chained(inner), 2, num_workers=num_workers)) == expected
    if num_workers:
        mixed = loader_class(_Chained(loader_class(Numbers(4), 2, num_workers=num_workers)), 2)
        assert as_lists(mixed) == [[[0, 1], [2, 3]]]


def test_pytorchs_loader_over_this_loaders_batches(loader_class: Any) -> None:
    outer = DataLoader(_Chained(loader_class(Stream(6), 3)), batch_size=None, num_workers=1)
    assert as_lists(outer) == [[0, 1, 2], [3, 4, 5]]


def test_batches_can_be_changed_and_kept(loader_class: Any, num_workers: int) -> None:
    data = Made(12, lambda index: torch.full((4,), float(index)))
    kept = []
    for batch in loader_class(data, 3, num_workers=num_workers):
        batch.mul_(2).add_(1)
        kept.append(batch)
    expected = [[[2.0 * index + 1] * 4 for index in range(start, start + 3)] for start in range(0, 12, 3)]
    assert as_lists(kept) == expected


def test_out_of_order_delivers_everything_once(loader_class: Any, num_workers: int) -> None:
    loader = loader_class(Numbers(41), 3, num_workers=num_workers, in_order=False)
    for _ in range(2):
        batches = list(loader)
        assert sorted(numbers_in(batches)) == list(range(41))
        assert sorted(len(batch) for batch in batches) == [2, *[3] * 13]


def test_out_of_order_does_not_wait_for_a_slow_first_sample(loader_class: Any) -> None:
    gate = multiprocessing.get_context("fork").Event()

    def make(index: int) -> Any:
        if index == 0:
            gate.wait()
        return torch.tensor(index)

    iterator = iter(loader_class(Made(10, make), num_workers=2, in_order=False))
    first = int(next(iterator))
    gate.set()
    rest = numbers_in(iterator)
    assert first != 0
    assert sorted([first, *rest]) == list(range(10))


def test_in_order_waits_for_a_slow_first_sample(loader_class: Any) -> None:
    """The gate opens once a later sample is made, so the samples overtake but the batches do not."""
    gate = multiprocessing.get_context("fork").Event()

    def make(index: int) -> Any:
        gate.wait() if index == 0 else gate.set()
        return torch.tensor([index, os.getpid()])

    assert [batch[0, 0] for batch in loader_class(Made(10, make), num_workers=2)] == list(range(10))


def test_without_workers_out_of_order_changes_nothing(loader_class: Any) -> None:
    assert numbers_in(loader_class(Numbers(10), 3, in_order=False)) == list(range(10))


@pytest.mark.parametrize("factor", [1, 5])
def test_prefetch_factor(loader_class: Any, factor: int) -> None:
    loader = loader_class(Numbers(30), 2, num_workers=2, prefetch_factor=factor)
    assert (loader.prefetch_factor, numbers_in(loader)) == (factor, list(range(30)))
