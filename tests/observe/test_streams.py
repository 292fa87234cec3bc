"""What is counted of iterable data sets: samples, as they yield them, whatever a batch of them looks like."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from minato_gpu import DataLoader
from tests.observe.traces import read


class Stream(IterableDataset[Any]):
    """``made`` of each of 21 numbers, shared out to workers; an error in place of the number 9."""

    def __init__(self, made: Any, *, fails: bool = False) -> None:
        self.made, self.fails = made, fails
        self.numbers: Iterator[int] = iter(())

    def __iter__(self) -> Stream:
        info = get_worker_info()
        self.numbers = iter(range(21) if info is None else range(info.id, 21, info.num_workers))
        return self

    def __next__(self) -> Any:
        number = next(self.numbers)
        if self.fails and number == 9:
            raise ValueError("nine")
        return self.made(number)


def _text(number: int) -> dict[str, str]:
    return {"text": "word " * number}


def _points(number: int) -> Any:
    return torch.full((number + 1, 2), number)


MADE = {"numbers": (torch.tensor, None), "texts": (_text, None), "points": (_points, torch.cat)}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [4, None])
@pytest.mark.parametrize("name", MADE)
def test_samples_are_what_the_data_set_yields(tmp_path: Path, name: str, batch_size: int | None, workers: int) -> None:
    made, collate = MADE[name]
    more: dict[str, Any] = {} if batch_size is None else {"collate_fn": collate}
    loader: Any = DataLoader(Stream(made), batch_size, num_workers=workers, trace=tmp_path / "run.pftrace", **more)
    batches = len(list(loader))
    stats, found = loader.stats(), read(tmp_path / "run.pftrace")
    assert (stats["samples_delivered"], stats["batches_delivered"]) == (21, batches)
    assert stats["lanes"]["cpu"]["samples"] == sum(span[6] for span in loader.timeline()["spans"]) == 21
    assert sum(each.values["samples"] for each in found.batches) == 21
    assert sum(each.values["samples"] for each in found.work) == 21
    assert min(found.counts) >= 0 == found.counts[-1]


@pytest.mark.parametrize("workers", [0, 1])
def test_what_an_error_takes_along_is_counted(workers: int) -> None:
    loader: Any = DataLoader(Stream(torch.tensor, fails=True), 4, num_workers=workers)
    batches, seen, errors = iter(loader), 0, 0
    while True:
        try:
            seen += len(next(batches))
        except ValueError:
            errors += 1
        except StopIteration:
            break
    stats = loader.stats()
    assert (seen, errors) == (19, 1)  # the number 8 was taken for the batch that raised
    assert (stats["samples_delivered"], stats["samples_failed"], stats["samples_skipped"]) == (19, 1, 1)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_cannot_be_joined_is_counted_whole(workers: int) -> None:
    def fails(samples: list[int]) -> list[int]:
        if 8 in samples:
            raise ValueError("eight")
        return samples

    loader: Any = DataLoader(Stream(int), 4, num_workers=workers, collate_fn=fails)
    batches = iter(loader)
    assert len(next(batches)) == len(next(batches)) == 4
    with pytest.raises(ValueError, match="eight"):
        next(batches)
    assert sum(map(len, batches)) == 9
    stats = loader.stats()
    assert (stats["samples_delivered"], stats["samples_failed"], stats["samples_skipped"]) == (17, 1, 3)
    assert stats["lanes"]["cpu"]["samples"] == 20
