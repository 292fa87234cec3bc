"""What default collation makes of every kind of sample, in the main process and through workers."""

from __future__ import annotations

import collections
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate, default_convert
from torch.utils.data._utils.collate import default_collate_fn_map

from tests.contracts.datasets import Made
from tests.support.raising import error_of
from tests.support.same import same


class Point(NamedTuple):
    x: Any
    y: Any


class Frozen(Mapping[str, Any]):
    """An immutable mapping that can be made from a dict."""

    def __init__(self, items: Any = ()) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Row(Sequence[Any]):
    """An immutable sequence of its own type."""

    def __init__(self, items: Any = ()) -> None:
        self._items = list(items)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Row) and same(self._items, other._items)

    __hash__ = None  # type: ignore[assignment]


class Tagged(dict[str, Any]):
    """A dict with an attribute, which collation keeps from the first sample."""

    tag = ""


def _tagged(index: int) -> Tagged:
    sample = Tagged(value=index)
    sample.tag = f"tag {index}"
    return sample


_DTYPES = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


def _nested(index: int) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype
        return torch.nested.nested_tensor([torch.zeros(2), torch.full((3,), index)])


_SHARED = torch.arange(100.0)


def _of_dtype(dtype: torch.dtype) -> Callable[[int], Any]:
    return lambda i: torch.tensor([[i % 2, 1, i]]).to(dtype)


_SAMPLES: dict[str, Callable[[int], Any]] = {
    **{str(dtype): _of_dtype(dtype) for dtype in _DTYPES},
    "int": lambda i: i,
    "float": lambda i: i / 3,
    "bool": lambda i: i % 2 == 0,
    "int then float": lambda i: i if i % 2 == 0 else i + 0.5,
    "float then int": lambda i: i + 0.5 if i % 2 == 0 else i,
    "nan": lambda i: float("nan"),
    "complex in array": lambda i: np.array([1j * i]),
    "string": lambda i: f"text {i}",
    "bytes": lambda i: b"raw %d" % i,
    "numpy float32": lambda i: np.float32(i / 3),
    "numpy int16": lambda i: np.int16(i),
    "numpy bool": lambda i: np.bool_(i % 2),
    "0-d array": lambda i: np.array(i / 3, dtype=np.float32),
    "0-d tensor": lambda i: torch.tensor(i / 3),
    "array": lambda i: np.full((2, 3), i, dtype=np.uint8),
    "array of uint16": lambda i: np.full((2,), 60_000 + i, dtype=np.uint16),
    "Fortran order": lambda i: np.asfortranarray(np.arange(6).reshape(2, 3) + i),
    "positive steps": lambda i: np.arange(20 + i)[i:][::2][:5],
    "empty tensor": lambda i: torch.empty(0, 3),
    "empty array": lambda i: np.empty((2, 0), dtype=np.int32),
    "transposed tensor": lambda i: (torch.arange(6) + i).reshape(2, 3).t(),
    "expanded tensor": lambda i: torch.tensor([float(i)]).expand(4),
    "views of one storage": lambda i: _SHARED[i : i + 4],
    "the same storage twice": lambda i: (_SHARED[i : i + 2], _SHARED[i : i + 2]),
    "channels last": lambda i: torch.full((1, 2, 3, 3), float(i)).to(memory_format=torch.channels_last)[0],
    "large": lambda i: torch.full((300_000,), float(i)),
    "tuple": lambda i: (torch.tensor(i), f"label {i}", i / 2),
    "list": lambda i: [torch.tensor(i), i],
    "dict": lambda i: {"image": torch.full((2, 2), i), "label": i, "name": str(i)},
    "nested": lambda i: {"a": [{"b": (i, torch.tensor(i))}], "c": {"d": b"x"}},
    "namedtuple": lambda i: Point(x=torch.tensor(i), y=f"{i}"),
    "namedtuple in a dict": lambda i: {"p": Point(i, [Point(i, i)])},
    "ordered dict": lambda i: collections.OrderedDict(b=i, a=torch.tensor(i)),
    "default dict": lambda i: collections.defaultdict(list, {"k": torch.tensor([i])}),
    "dict in another order": lambda i: {"a": i, "b": -i} if i < 2 else {"b": -i, "a": i},
    "dict with other keys": lambda i: {1: i, (2, "x"): i, None: i},
    "own immutable mapping": lambda i: Frozen({"a": i, "b": torch.tensor(i)}),
    "own sequence": lambda i: Row([i, torch.tensor(i)]),
    "range": lambda i: range(i, i + 3),
    "deque": lambda i: collections.deque([i, torch.tensor(i)]),
    "empty tuple": lambda i: (),
    "empty dict": lambda i: {},
}


@pytest.mark.parametrize("num_workers", [0, 1], ids=["main", "worker"])
@pytest.mark.parametrize("kind", _SAMPLES)
def test_default_collation(loader_class: Any, num_workers: int, kind: str) -> None:
    make = _SAMPLES[kind]
    received = list(loader_class(Made(5, make), batch_size=2, num_workers=num_workers))
    expected = [default_collate([make(index) for index in batch]) for batch in ([0, 1], [2, 3], [4])]
    assert len(received) == 3
    for got, wanted in zip(received, expected, strict=True):
        assert same(got, wanted), f"{got!r} is not {wanted!r}"


def _as_list(batch: Any, *, collate_fn_map: Any = None) -> list[Any]:
    return list(batch)


@pytest.mark.parametrize("num_workers", [0, 1], ids=["main", "worker"])
@pytest.mark.parametrize(
    ("registered", "kind"),
    [
        (torch.Tensor, "0-d tensor"),
        (torch.Tensor, "array"),
        (np.ndarray, "array"),
        (np.number, "numpy float32"),
        (int, "int"),
        (int, "bool"),
        (float, "tuple"),
        (str, "dict"),
        (bytes, "nested"),
        (list, "list"),
        (tuple, "tuple"),
        (dict, "dict"),
        (Point, "namedtuple in a dict"),
        (Sequence, "nested"),
        (Mapping, "namedtuple"),
    ],
)
def test_registered_functions_are_used(
    loader_class: Any, num_workers: int, registered: type, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last one's type nothing comes."""
    monkeypatch.setitem(default_collate_fn_map, registered, _as_list)
    test_default_collation(loader_class, num_workers, kind)


def _made(key: tuple[str, int]) -> Any:
    kind, index = key
    return _SAMPLES[kind](index)


@pytest.mark.parametrize("num_workers", [0, 1], ids=["main", "worker"])
def test_default_conversion_without_batching(loader_class: Any, num_workers: int) -> None:
    """Of every kind, all by one worker: samples without batches have no layout, which a loader learns of the first."""
    keys = [(kind, index) for kind in _SAMPLES for index in range(3)]
    loader = loader_class(Made(len(keys), _made), batch_size=None, sampler=keys, num_workers=num_workers)
    for key, got in zip(keys, loader, strict=True):
        wanted = default_convert(_made(key))
        assert same(got, wanted), f"{key}: {got!r} is not {wanted!r}"


def test_conjugate_views(loader_class: Any) -> None:
    """In the main process only: through workers PyTorch 2.13 refuses to stack them, and unbatched loses the sign."""
    loader = loader_class(Made(2, lambda i: torch.tensor([1j * i, 2.0]).conj()), batch_size=2)
    assert next(iter(loader)).tolist() == [[0, 2], [-1j, 2]]


def test_mapping_keeps_the_extra_attributes_of_the_first_sample(loader_class: Any, num_workers: int) -> None:
    batch = next(iter(loader_class(Made(2, _tagged), batch_size=2, num_workers=num_workers)))
    assert (type(batch), batch.tag, batch["value"].tolist()) == (Tagged, "tag 0", [0, 1])


_REFUSED: dict[str, tuple[Callable[[int], Any], type[Exception], str]] = {
    "None": (lambda i: None, TypeError, "default_collate: batch must contain tensors, numpy arrays, numbers"),
    "object": (lambda i: types.SimpleNamespace(), TypeError, "default_collate: batch must contain tensors"),
    "array of text": (lambda i: np.array(["a"]), TypeError, "default_collate: batch must contain tensors"),
    "array of objects": (lambda i: np.array([None]), TypeError, "default_collate: batch must contain tensors"),
    "unequal shapes": (lambda i: torch.zeros(i + 1), RuntimeError, "stack expects each tensor to be equal size"),
    "unequal arrays": (lambda i: np.zeros((2, i)), RuntimeError, "stack expects each tensor to be equal size"),
    "unequal lists": (lambda i: [0] * (i + 1), RuntimeError, "each element in list of batch should be of equal size"),
    "missing key": (lambda i: {"a": 1} if i == 0 else {"b": 1}, KeyError, "'a'"),
    "nested": (lambda i: _nested(i), RuntimeError, "Batches of nested tensors are not currently supported"),
    "sparse COO": (lambda i: torch.eye(2).to_sparse(), RuntimeError, "Batches of sparse tensors are not currently"),
}


@pytest.mark.parametrize("kind", _REFUSED)
def test_what_default_collation_refuses(loader_class: Any, num_workers: int, kind: str) -> None:
    make, error, text = _REFUSED[kind]
    caught = error_of(error, list, loader_class(Made(4, make), batch_size=2, num_workers=num_workers))
    assert type(caught) is error
    assert text in str(caught)
