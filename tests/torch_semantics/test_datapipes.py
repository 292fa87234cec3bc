"""PyTorch's data pipes: still part of its DataLoader, with sharding and shuffle settings applied by it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.utils.data.datapipes.iter import IterableWrapper
    from torch.utils.data.datapipes.map import SequenceWrapper

from tests.torch_semantics.datasets import as_lists, numbers_in


def test_stream_pipe(loader_class: Any) -> None:
    pipe = IterableWrapper(range(6)).map(_double)
    assert as_lists(loader_class(pipe, batch_size=4)) == [[0, 2, 4, 6], [8, 10]]


def _double(number: int) -> int:
    return 2 * number


def test_sharded_pipe(loader_class: Any, num_workers: int) -> None:
    pipe = IterableWrapper(range(10)).sharding_filter()
    assert sorted(numbers_in(loader_class(pipe, batch_size=2, num_workers=num_workers))) == list(range(10))


@pytest.mark.parametrize("shuffle", [True, False])
def test_shuffle_setting(loader_class: Any, num_workers: int, shuffle: bool) -> None:
    pipe = IterableWrapper(range(30)).shuffle().sharding_filter()
    loader = loader_class(pipe, shuffle=shuffle, num_workers=num_workers)
    torch.manual_seed(3)
    first = numbers_in(loader)
    assert sorted(first) == list(range(30))
    assert (first == list(range(30))) is not shuffle
    torch.manual_seed(3)
    assert numbers_in(loader) == first


def test_map_pipe(loader_class: Any, num_workers: int) -> None:
    pipe = SequenceWrapper(range(6))
    assert as_lists(loader_class(pipe, batch_size=4, num_workers=num_workers)) == [[0, 1, 2, 3], [4, 5]]
