"""The check of what was delivered must be able to fail: a loader that drops, repeats or changes a sample is caught."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.content import Consumer, ContentError, reference
from benchmarks.datasets import Costly, Trivial
from benchmarks.isolate import MeasurementError, isolated
from benchmarks.overhead import measure
from benchmarks.peers import Job
from benchmarks.peers.pytorch import PyTorch

_DATASET = Trivial(96, words=16)
_JOB = Job(_DATASET, batch_size=32, workers=1, sample_bytes=128)


def _batches() -> list[Any]:
    return [np.stack([_DATASET[index] for index in batch]) for batch in _JOB.batches]


def _read(batches: Iterable[Any]) -> Consumer:
    consumer = Consumer()
    for batch in batches:
        consumer.read(batch)
    return consumer


def _dropped(batches: list[Any]) -> list[Any]:
    return [batches[0], batches[1][1:], batches[2]]


def _twice(batches: list[Any]) -> list[Any]:
    batches[2][5] = batches[0][5]
    return [*batches, _DATASET[69][None]]


def _changed(batches: list[Any]) -> list[Any]:
    batches[1][3, 15] += 1
    return batches


def _foreign(batches: list[Any]) -> list[Any]:
    batches[1][3] += 1000
    return batches


def test_what_is_delivered_whole_passes_in_any_order() -> None:
    batches = [torch.from_numpy(batch) for batch in reversed(_batches())]
    _read(batches).check(reference(_DATASET))


def test_several_epochs_are_counted_together() -> None:
    consumer = _read([*_batches(), *_batches()])
    consumer.check(reference(_DATASET), epochs=2)
    with pytest.raises(ContentError, match="repeated"):
        consumer.check(reference(_DATASET), epochs=1)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (_dropped, "missing samples: 32"),
        (_twice, "repeated samples: 5"),
        (_changed, "changed samples: 35"),
        (_foreign, "outside the data set"),
    ],
)
def test_damage_is_named(damage: Callable[[list[Any]], list[Any]], problem: str) -> None:
    with pytest.raises(ContentError, match=problem):
        _read(damage(_batches())).check(reference(_DATASET))


def test_nothing_delivered_is_everything_missing() -> None:
    with pytest.raises(ContentError, match="missing samples: 0, 1, 2, 3, 4 and 91 more"):
        Consumer().check(reference(_DATASET))


class _Dropping(PyTorch):
    """PyTorch's loader, but the last sample of the second batch never arrives."""

    def make(self, job: Job) -> Iterable[Any]:
        return self._without_one(super().make(job))

    @staticmethod
    def _without_one(batches: Iterable[Any]) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            yield batch[:-1] if number == 1 else batch


@pytest.mark.usefixtures("no_leaks")
def test_a_loader_that_drops_a_sample_fails_its_measurement() -> None:
    expected = reference(_DATASET)
    isolated(measure, PyTorch("whole"), _JOB, expected)
    with pytest.raises(MeasurementError, match="missing samples: 63"):
        isolated(measure, _Dropping("dropping"), _JOB, expected)


def test_the_work_enters_the_sample() -> None:
    """A loader that skipped the work could not produce the digest."""
    some, more = (Costly(np.full(4, operations), words=8) for operations in (3, 4))
    assert reference(some).tolist() == reference(some).tolist()
    assert not np.any(reference(some) == reference(more))
