"""Map-style data sets and iterators: the protocol, batching, bulk reading, composed data sets, lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    random_split,
)

from tests.contracts.datasets import Made
from tests.support.leaks import child_pids
from tests.support.raising import error_of
from tests.support.same import same
from tests.torch_semantics.datasets import Numbers, as_lists, keep


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


@pytest.mark.parametrize("length", [0, 1, 5, 6, 7])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches(loader_class: Any, num_workers: int, length: int, drop_last: bool) -> None:
    loader = loader_class(Numbers(length), batch_size=3, num_workers=num_workers, drop_last=drop_last)
    everything = list(range(length))
    expected = [everything[start : start + 3] for start in range(0, length, 3)]
    if drop_last and expected and len(expected[-1]) < 3:
        expected.pop()
    assert as_lists(loader) == expected
    assert len(loader) == len(expected)


def test_any_sequence_is_a_data_set(loader_class: Any, num_workers: int) -> None:
    for data in ([10, 11, 12], range(10, 13), (10, 11, 12), torch.tensor([10, 11, 12])):
        assert as_lists(loader_class(data, batch_size=2, num_workers=num_workers)) == [[10, 11], [12]]


class _Bulk(Numbers):
    """Answers ``__getitems__`` only; one by one it fails."""

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("__getitems__ should have been used")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert isinstance(indices, list)
        return [torch.tensor(index) for index in indices]


def test_getitems_is_preferred(loader_class: Any, num_workers: int) -> None:
    assert as_lists(loader_class(_Bulk(5), batch_size=2, num_workers=num_workers)) == [[0, 1], [2, 3], [4]]


def test_getitems_is_not_used_without_batching(loader_class: Any) -> None:
    with pytest.raises(AssertionError, match="should have been used"):
        list(loader_class(_Bulk(2), batch_size=None))


_COLUMN = torch.arange(10, 20)
_RETURNED: dict[str, Any] = {
    "columns": lambda indices: {"x": _COLUMN[indices]},
    "tensor": lambda indices: _COLUMN[indices],
    "text": lambda indices: "".join(map(str, indices)),
    "fewer": lambda indices: [index for index in indices if index % 4],
    "more": lambda indices: indices * 2,
    "iterator": iter,
    "nothing": lambda indices: None,
}


@pytest.mark.parametrize("returned", _RETURNED)
def test_collate_gets_what_getitems_returns(loader_class: Any, returned: str) -> None:
    """Whatever that is, where the whole batch is asked for at once."""

    class Returns(Numbers):
        def __getitems__(self, indices: list[int]) -> Any:
            made.append(_RETURNED[returned](indices))
            return made[-1]

    made: list[Any] = []
    got = list(loader_class(Returns(10), batch_size=4, collate_fn=keep))
    assert len(got) == 3 and all(one is other for one, other in zip(got, made, strict=True))


class _NoBulk(Numbers):
    __getitems__ = None


def test_getitems_that_is_none_counts_as_absent(loader_class: Any, num_workers: int) -> None:
    assert as_lists(loader_class(_NoBulk(3), batch_size=2, num_workers=num_workers)) == [[0, 1], [2]]


def _composed() -> dict[str, Any]:
    pairs = TensorDataset(torch.arange(6.0), torch.arange(12).reshape(6, 2))
    generator = torch.Generator().manual_seed(0)
    return {
        "tensors": pairs,
        "subset": Subset(pairs, [4, 0, 2]),
        "concatenated": ConcatDataset([Numbers(3), Numbers(4)]),
        "stacked": StackDataset(a=Numbers(6), b=pairs),
        "split": random_split(Numbers(9), [4, 5], generator=generator)[1],
    }


@pytest.mark.parametrize("name", list(_composed()))
def test_composed_data_sets(loader_class: Any, num_workers: int, name: str) -> None:
    data = _composed()[name]
    indices = range(len(data))
    expected = [default_collate([data[i] for i in indices[start : start + 2]]) for start in range(0, len(data), 2)]
    received = list(loader_class(data, batch_size=2, num_workers=num_workers))
    assert len(received) == len(expected)
    assert all(map(same, received, expected))


def test_length_follows_a_growing_data_set(loader_class: Any) -> None:
    data = [torch.ones(2) for _ in range(4)]
    loaders = [loader_class(data), loader_class(data, shuffle=True), loader_class(data, num_workers=1)]
    data.append(torch.ones(2))
    assert [len(loader) for loader in loaders] == [5, 5, 5]
    assert [len(list(loader)) for loader in loaders] == [5, 5, 5]


def test_each_epoch_sees_the_data_set_as_it_is_when_it_starts(loader_class: Any, num_workers: int) -> None:
    data = [torch.tensor(number) for number in range(4)]
    loader = loader_class(data, batch_size=2, num_workers=num_workers)
    assert as_lists(loader) == [[0, 1], [2, 3]]
    data[0] = torch.tensor(50)
    assert as_lists(loader) == [[50, 1], [2, 3]]


class _Unsized:
    def __getitem__(self, index: int) -> int:
        return index


def test_a_data_set_without_length(loader_class: Any) -> None:
    loader = loader_class(_Unsized(), batch_size=2)
    with pytest.raises(TypeError, match="len"):
        len(loader)
    assert as_lists(loader_class(_Unsized(), batch_size=2, sampler=[3, 1, 2])) == [[3, 1], [2]]
