"""Multiprocessing contexts, by name and as objects. Spawned workers import torch, so there are few of them."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import pytest
import torch
import torch.multiprocessing

from tests.contracts.datasets import Made
from tests.support.raising import error_of
from tests.torch_semantics.datasets import Numbers, Stream, as_lists, numbers_in


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
