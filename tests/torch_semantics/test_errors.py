"""Exceptions of the user's code: type and text arrive, the place is told, and the iteration may go on. Workers that die
or hang are in ``tests.contracts``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.contracts.datasets import Made
from tests.support.raising import error_of
from tests.torch_semantics.datasets import Numbers, as_lists


def _fails_at(bad: int, error: Any) -> Made:
    def make(index: int) -> Any:
        if index == bad:
            raise error
        return torch.tensor(index)

    return Made(8, make)


def test_without_workers_the_very_exception_arrives(loader_class: Any) -> None:
    error = ValueError("bad sample", 3)
    caught = error_of(ValueError, list, loader_class(_fails_at(3, error), 2))
    assert caught is error
    assert caught.args == ("bad sample", 3)


@pytest.mark.parametrize("kind", [ValueError, ZeroDivisionError, IndexError, OSError, NotImplementedError])
def test_with_workers_the_type_and_the_text_arrive(loader_class: Any, kind: type[Exception]) -> None:
    caught = error_of(kind, list, loader_class(_fails_at(3, kind("bad sample")), 2, num_workers=2))
    text = str(caught)
    assert type(caught) is kind
    assert text.startswith(f"Caught {kind.__name__} in DataLoader worker process ")
    assert "Original Traceback (most recent call last):" in text
    assert f"{kind.__name__}: bad sample" in text
    assert "in make" in text


def test_key_error_keeps_its_lines(loader_class: Any) -> None:
    """``str`` of a KeyError is the ``repr`` of its argument; the traceback must stay readable all the same."""
    text = str(error_of(KeyError, list, loader_class(_fails_at(3, KeyError("one\ntwo")), 2, num_workers=1)))
    assert text.startswith("Caught KeyError in DataLoader worker process 0")
    assert "\nOriginal Traceback" in text
    assert repr("one\ntwo") in text


class SeveralArguments(Exception):
    """Its constructor does not take one text."""

    def __init__(self, path: str, line: int) -> None:
        super().__init__(f"{path}:{line} is broken")


def test_exception_with_several_arguments(loader_class: Any) -> None:
    error = SeveralArguments("file.txt", 12)
    assert error_of(SeveralArguments, list, loader_class(_fails_at(3, error), 2)) is error
    text = str(error_of(RuntimeError, list, loader_class(_fails_at(3, error), 2, num_workers=1)))
    assert text.startswith("Caught SeveralArguments in DataLoader worker process 0")
    assert "file.txt:12 is broken" in text


class WithMessage(Exception):
    """Has a ``message`` that its constructor takes by name only."""

    message = "none"

    def __init__(self, *, message: str) -> None:
        super().__init__(message)
        self.message = message


def test_exception_with_a_message_keyword(loader_class: Any) -> None:
    loader = loader_class(_fails_at(3, WithMessage(message="lost")), 2, num_workers=1)
    caught = error_of(WithMessage, list, loader)
    assert isinstance(caught, WithMessage)
    assert "lost" in caught.message and caught.message.startswith("Caught WithMessage in DataLoader worker process 0")


def test_an_exception_that_cannot_be_pickled(loader_class: Any) -> None:
    error = LookupError("holds a function", lambda: None)
    assert "holds a function" in str(error_of(LookupError, list, loader_class(_fails_at(3, error), 2, num_workers=1)))


def test_stop_iteration_of_a_map_style_data_set(loader_class: Any) -> None:
    """PyTorch: with workers it is an error like any other whose message ends the loop; without, it ends the loop. Here
    it is an error (see tests/contracts/test_table.py)."""
    data = _fails_at(3, StopIteration())
    torchs = loader_class is torch.utils.data.DataLoader
    if torchs:
        assert as_lists(loader_class(data, 2)) == [[0, 1]]
    iterator = iter(loader_class(data, 2, num_workers=1))
    assert next(iterator).tolist() == [0, 1]
    raised = error_of(StopIteration if torchs else RuntimeError, next, iterator)
    assert "Caught StopIteration in DataLoader worker process 0" in str(raised)
    assert as_lists(iterator) == [[4, 5], [6, 7]]


def test_index_error_beyond_the_end(loader_class: Any, num_workers: int) -> None:
    caught = error_of(IndexError, list, loader_class([1, 2], sampler=[0, 5], num_workers=num_workers))
    assert "list index out of range" in str(caught)


def test_timeout_needs_workers(loader_class: Any) -> None:
    loader = loader_class(Numbers(4), timeout=1)
    with pytest.raises(AssertionError, match="timeout == 0"):
        iter(loader)
