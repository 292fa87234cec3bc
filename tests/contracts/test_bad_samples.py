"""What ``on_error`` and ``max_failures`` accept and do, beyond the table's faults (``cases.py``)."""

from __future__ import annotations

import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu import DataLoader, Pipeline, Stage, TooManyFailures
from minato_gpu.pipeline.pipeline import Field, TorchFunction
from tests.contracts.datasets import Made
from tests.contracts.modes import MINATO, Mode
from tests.contracts.resuming import through_json
from tests.support.raising import error_of

BAD = (5, 6, 17, 30)
GOOD = [index for index in range(40) if index not in BAD]
_FORK = multiprocessing.get_context("fork")


def broken(index: int) -> Any:
    """Those of ``BAD`` are."""
    if index in BAD:
        raise ValueError(f"sample {index} is broken")
    return torch.tensor(index)


def numbers(batches: Any) -> list[int]:
    """What was delivered, in one list."""
    return [int(number) for batch in batches for number in batch]


@pytest.mark.parametrize("workers", [0, 2])
def test_data_sets_that_fetch_fewer_than_they_are_asked_for(workers: int) -> None:
    """What is missing is counted; a batch of which nothing comes is an error where nothing may be left out."""

    class Fewer(Made):
        def __getitems__(self, keys: list[int]) -> list[Any]:
            return [self.make(key) for key in keys if not 8 <= key <= 12]

    loader = DataLoader(Fewer(40, torch.tensor), 4, num_workers=workers, on_error="skip")
    assert numbers(loader) == [index for index in range(40) if not 8 <= index <= 12]
    stats = loader.stats()
    assert (stats["samples_delivered"], stats["samples_failed"]) == (35, 5)
    with pytest.raises((IndexError, ValueError)):
        list(DataLoader(Fewer(12, torch.tensor), 4, num_workers=workers))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("answer", [None, StopIteration])
def test_answers_that_mean_nothing(answer: Any, workers: int) -> None:
    """And what would end the loop without a word."""

    def decide(bad: Any) -> Any:
        if answer is not None:
            raise answer
        return answer

    text = "on_error returned None" if answer is None else "StopIteration"
    with pytest.raises((ValueError, RuntimeError), match=text):
        list(DataLoader(Made(40, broken), 4, num_workers=workers, on_error=decide))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("limit", "fits"),
    [(4, True), (3, False), (0, False), (0.1, True), (np.int64(3), False), (np.float32(0.125), True), (0.05, False)],
)
def test_the_budget(limit: Any, fits: bool, workers: int) -> None:
    loader = DataLoader(Made(40, broken), 4, num_workers=workers, on_error="skip", max_failures=limit)
    if fits:
        assert numbers(loader) == GOOD
    else:
        with pytest.raises(TooManyFailures, match="samples failed in this epoch, max_failures="):
            list(loader)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_the_budget_counts_on_after_a_resume(mode: Mode, workers: int) -> None:
    """Three may be left out, and the fourth comes after the resume: with its count it is one too many."""

    def rarely(index: int) -> Any:
        return torch.tensor(index) if index % 25 != 5 else broken(5)

    def make() -> Any:
        return mode.loader(Made(100, rarely), 4, num_workers=workers, on_error="skip", max_failures=3)

    loader = make()
    iterator = iter(loader)
    while loader.stats()["samples_failed"] < 3:
        next(iterator)
    resumed = make()
    resumed.load_state_dict(through_json(loader.state_dict()))
    text = str(error_of(TooManyFailures, list, resumed))
    assert "4 samples failed in this epoch, max_failures=3" in text
    assert "4 samples failed" in str(error_of(TooManyFailures, list, resumed)), "the next epoch counts from nothing"


def _shift_in_place(fields: Any, params: Any) -> Any:
    """Works in place, as a CPU stage may, and raises afterwards at its first try of every other sample."""
    row, tries = fields["row"], fields["tries"]
    row += 100
    tries += 1
    index = int(fields["index"])
    if index % 2 and not _TRIED[index]:
        _TRIED[index] = 1
        raise OSError("try again")
    return {"row": row}


_TRIED = _FORK.Array("i", 40)


_ROW, _INDEX = Field(np.float32, (4,)), Field(np.int64)


_IN_PLACE = Pipeline(
    (
        Stage(
            "read",
            reads=("number",),
            writes={"row": _ROW, "index": _INDEX, "tries": Field(np.int64, (1,))},
            cpu=lambda fields, params: {
                "row": np.full(4, fields["number"], np.float32),
                "index": fields["number"],
                "tries": np.zeros(1, np.int64),
            },
        ),
        Stage(
            "shift",
            reads=("row", "index", "tries"),
            writes={"row": _ROW},
            cpu=_shift_in_place,
            device=TorchFunction(lambda fields, params: {"row": fields["row"] + 100}),
        ),
    ),
    outputs=("row", "index"),
)


@pytest.mark.parametrize(("lanes", "kind"), [(("cpu",), "thread"), (("cpu", "device"), "process")], ids=str)
def test_a_second_try_sees_what_the_first_one_saw(lanes: Any, kind: Any) -> None:
    for index in range(40):
        _TRIED[index] = 0
    data = Made(40, lambda index: {"number": index})
    loader = DataLoader(
        data, 4, num_workers=1, pipeline=_IN_PLACE, lanes=lanes, worker_kind=kind, on_error="retry", shuffle=False
    )
    found = [row[0] for batch in loader for row in batch["row"].tolist()]
    assert found == [index + 100.0 for index in range(40)]
