"""Iterable data sets: one stream per worker, batches per stream, lengths and the warning about wrong ones."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import ChainDataset, IterableDataset, get_worker_info

from tests.torch_semantics.datasets import SizedStream, Stream, keep, numbers_in


def test_a_stream_that_does_not_share_is_repeated_by_each_worker(loader_class: Any) -> None:
    class Selfish(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    assert sorted(numbers_in(loader_class(Selfish(), batch_size=2, num_workers=2))) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_chained_streams(loader_class: Any) -> None:
    chain = ChainDataset([Stream(3), Stream(4)])
    assert numbers_in(loader_class(chain, batch_size=2)) == [0, 1, 2, 0, 1, 2, 3]
    assert sorted(numbers_in(loader_class(chain, batch_size=2, num_workers=2))) == [0, 0, 1, 1, 2, 2, 3]


class _Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1


def test_endless_stream_left_early(loader_class: Any, num_workers: int) -> None:
    loader = loader_class(_Endless(), batch_size=3, num_workers=num_workers)
    for _ in range(2):
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1, 2]
        del iterator


class _Counting(IterableDataset[Any]):
    """Yields how many times this copy of the data set has been iterated."""

    def __init__(self) -> None:
        self.iterated = 0

    def __iter__(self) -> Iterator[Any]:
        self.iterated += 1
        yield torch.tensor(self.iterated)


def test_persistent_workers_begin_their_stream_anew(loader_class: Any) -> None:
    loader = loader_class(_Counting(), batch_size=None, num_workers=2, persistent_workers=True)
    assert [[int(sample) for sample in loader] for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]
    fresh = loader_class(_Counting(), batch_size=None, num_workers=2)
    assert [[int(sample) for sample in fresh] for _ in range(2)] == [[1, 1], [1, 1]]


class _Seeds(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        yield [info.id, info.num_workers, info.seed - torch.initial_seed(), int(info.dataset is self)]


def test_worker_info_in_a_stream(loader_class: Any) -> None:
    loader = loader_class(_Seeds(), batch_size=None, num_workers=3, collate_fn=keep)
    assert list(loader) == [[0, 3, 0, 1], [1, 3, 0, 1], [2, 3, 0, 1]]


@pytest.mark.parametrize(
    ("length", "batch_size", "drop_last", "expected"),
    [(10, 3, False, 4), (10, 3, True, 3), (10, None, False, 10), (0, 3, False, 0)],
)
def test_length(loader_class: Any, length: int, batch_size: int | None, drop_last: bool, expected: int) -> None:
    for workers in (0, 2):
        data = SizedStream(length, length)
        loader = loader_class(data, batch_size=batch_size, drop_last=drop_last, num_workers=workers)
        assert len(loader) == expected


def test_no_length(loader_class: Any) -> None:
    with pytest.raises(TypeError, match="len"):
        len(loader_class(Stream(3)))


def test_more_samples_than_the_length_that_was_asked_for(loader_class: Any) -> None:
    loader = loader_class(SizedStream(4, 2))
    assert len(loader) == 2
    with pytest.warns(UserWarning, match="^Length of IterableDataset ") as caught:
        assert numbers_in(loader) == [0, 1, 2, 3]
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 2
    assert all(text.startswith("Length of IterableDataset ") for text in texts)
    assert "was reported to be 2" in texts[0] and "but 3 samples have been fetched" in texts[0]
    assert "but 4 samples have been fetched" in texts[1]
    assert "Multiprocessing" not in texts[0]


def test_more_samples_with_workers_names_the_likely_cause(loader_class: Any) -> None:
    loader = loader_class(SizedStream(4, 2), num_workers=2)
    len(loader)
    with pytest.warns(UserWarning, match="For multiprocessing data-loading, this could be caused by") as caught:
        assert sorted(numbers_in(loader)) == [0, 1, 2, 3]
    assert (
        len([each for each in caught if each.category is not DeprecationWarning]) == 2
    )  # Python 3.12 has one of forks


def test_no_warning_unless_the_length_was_asked_for(loader_class: Any, num_workers: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sorted(numbers_in(loader_class(SizedStream(4, 2), num_workers=num_workers))) == [0, 1, 2, 3]


def test_no_warning_for_fewer_samples_than_the_length(loader_class: Any, num_workers: int) -> None:
    loader = loader_class(SizedStream(4, 100), num_workers=num_workers)
    assert len(loader) == 100
    assert sorted(numbers_in(loader)) == [0, 1, 2, 3]
