"""A sample that cannot be sent to another process, or not be loaded there, is a bad one, and is so alone."""

from __future__ import annotations

import multiprocessing
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from minato_gpu import DataLoader
from tests.contracts.broken import BAD, COLLATE, GOOD, broken, numbers
from tests.contracts.datasets import Made
from tests.contracts.modes import BY_PROCESSES, Mode
from tests.support.raising import error_of, text_of

_FORK = multiprocessing.get_context("fork")


def _unsendable(index: int) -> Any:
    return (lambda: index) if index in BAD else torch.tensor(index)


@pytest.mark.parametrize("collate", COLLATE)
@pytest.mark.parametrize("mode", BY_PROCESSES, ids=lambda mode: mode.name)
def test_a_sample_that_cannot_be_pickled_is_left_out_alone(mode: Mode, collate: str) -> None:
    loader = mode.loader(
        Made(40, _unsendable), 4, num_workers=2, on_error="skip", collate_fn=COLLATE[collate], shuffle=False
    )
    for _ in range(2):
        assert sorted(numbers(loader)) == GOOD
        stats = loader.stats()
        assert (stats["samples_delivered"], stats["samples_failed"], stats["samples_skipped"]) == (36, 4, 0)
        told = [(bad["epoch"], bad["position"], bad["index"], bad["stage"], bad["lane"]) for bad in stats["failures"]]
        assert sorted(told) == [(told[0][0], index, str(index), "send", "cpu") for index in BAD]


@pytest.mark.parametrize("collate", COLLATE)
@pytest.mark.parametrize("mode", BY_PROCESSES, ids=lambda mode: mode.name)
def test_the_error_of_a_sample_that_cannot_be_pickled_names_it(mode: Mode, collate: str) -> None:
    """Where ``default_collate`` itself refuses the sample, its own error is what PyTorch raises too."""
    data = Made(8, lambda index: (lambda: 1) if index == 5 else torch.tensor(index))
    text = text_of(error_of(Exception, list, mode.loader(data, 4, num_workers=1, collate_fn=COLLATE[collate])))
    if "default_collate" not in text:
        for part in ("epoch 0", "position 5", "index 5", "stage 'send'", "lane cpu"):
            assert part in text, text


@pytest.mark.parametrize("mode", BY_PROCESSES, ids=lambda mode: mode.name)
def test_samples_that_a_collate_function_makes_sendable_are_fine(mode: Mode) -> None:
    """And what really fails among them is left out, though one worker must prepare each batch."""

    def make(index: int) -> Any:
        return broken(index), lambda: index

    def collate(samples: list[Any]) -> Any:
        return [int(value) + 100 * function() for value, function in samples]

    loader = mode.loader(Made(40, make), 4, num_workers=2, on_error="skip", collate_fn=collate)
    assert sorted(numbers(loader)) == [101 * index for index in GOOD]
    assert loader.stats()["samples_failed"] == 4


@pytest.mark.parametrize("mode", BY_PROCESSES, ids=lambda mode: mode.name)
def test_batches_whose_samples_can_none_of_them_be_sent(mode: Mode) -> None:
    loader = mode.loader(Made(8, lambda index: lambda: index), 2, num_workers=1, collate_fn=list, on_error="skip")
    assert list(loader) == []
    assert loader.stats()["samples_failed"] == 8


@pytest.mark.parametrize("mode", BY_PROCESSES, ids=lambda mode: mode.name)
def test_a_tensor_with_a_history(mode: Mode) -> None:
    """It requires grad and is not a leaf: it cannot leave its worker."""

    def make(index: int) -> Any:
        value = torch.full((), float(index))
        return value.requires_grad_() * 1 if index in BAD else value

    loader = mode.loader(Made(40, make), 4, num_workers=2, on_error="skip")
    assert sorted(numbers(loader)) == GOOD
    assert {bad["stage"] for bad in loader.stats()["failures"]} == {"send"}


class _Unloadable:
    """Can be sent, and not be loaded."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __reduce__(self) -> Any:
        return _cannot_be_loaded, (self.index,)


def _cannot_be_loaded(index: int) -> Any:
    raise ValueError(f"{index} cannot be loaded")


@pytest.mark.parametrize("mode", BY_PROCESSES, ids=lambda mode: mode.name)
def test_samples_that_no_other_worker_can_load(mode: Mode) -> None:
    """The worker that joins their batch prepares them, and what a collate function makes of them is fine.

    What was prepared twice is counted. How much that is depends: where one worker prepares all of a batch, nothing is.
    """
    prepared = _FORK.Array("i", 40)

    def make(index: int) -> Any:
        with prepared.get_lock():
            prepared[index] += 1
        return _Unloadable(index) if index in BAD else torch.tensor(index)

    def collate(samples: list[Any]) -> Any:
        return [sample.index if isinstance(sample, _Unloadable) else int(sample) for sample in samples]

    loader = mode.loader(Made(40, make), 4, num_workers=2, collate_fn=collate)
    assert sorted(numbers(loader)) == list(range(40))
    assert loader.stats()["samples_repeated"] == sum(prepared[index] for index in range(40)) - 40


def _raises_what_only_it_knows(index: int) -> Any:
    module = ModuleType("made_in_a_worker")
    sys.modules[module.__name__] = module
    exec("class Unknown(Exception): pass", module.__dict__)
    raise module.Unknown("the reason")


@pytest.mark.parametrize("mode", BY_PROCESSES, ids=lambda mode: mode.name)
def test_errors_of_a_class_that_only_workers_know(mode: Mode) -> None:
    data = Made(40, lambda index: _raises_what_only_it_knows(index) if index in BAD else torch.tensor(index))
    loader = mode.loader(data, 4, num_workers=2, on_error="skip")
    assert sorted(numbers(loader)) == GOOD
    assert loader.stats()["samples_failed"] == 4
    with pytest.raises(RuntimeError, match=r"(?s)Unknown, whose class cannot be loaded here.*the reason"):
        list(mode.loader(data, 4, num_workers=2))


def test_a_collate_function_that_fails_is_not_its_samples_fault() -> None:
    def collate(samples: list[Any]) -> Any:
        raise ArithmeticError("mine")

    with pytest.raises(ArithmeticError, match="mine"):
        list(DataLoader(Made(8, _unsendable), 2, num_workers=1, collate_fn=collate, on_error="skip"))
