"""Layouts: rows written by workers and batched without a copy equal ``default_collate`` of the same samples."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from minato_gpu.memory.layout import Layout, Mismatch
from tests.support.same import same

Make = Callable[[np.random.Generator], Any]
"""From a generator to one more sample of the same structure."""

_NUMPY = tuple(np.dtype(kind) for kind in ["?", *"bBhHiIlLefdFD"])
_TORCH = (
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64),
    *(torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)


def _bytes(rng: np.random.Generator, dtype: np.dtype[Any], count: int) -> Any:
    if dtype == np.bool_:
        return rng.integers(2, size=count).astype(np.bool_)
    return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).copy()


def _scalar(dtype: np.dtype[Any], rng: np.random.Generator) -> Any:
    return np.nan_to_num(_bytes(rng, dtype, 1))[0]  # torch quiets some NaN, which changes their bits


_SCALARS: dict[str, Make] = {
    "bool": lambda rng: bool(rng.integers(2)),
    "int": lambda rng: int(rng.integers(-(1 << 63), 1 << 63, dtype=np.int64)),
    "float": lambda rng: float(rng.choice([rng.normal(), np.nan, np.inf, -0.0])),
    **{str(d): functools.partial(_scalar, d) for d in _NUMPY if d != np.uint64},
}


class Pair(NamedTuple):
    """A namedtuple of the tests."""

    left: Any
    right: Any


def _array(dtype: np.dtype[Any], shape: tuple[int, ...], order: str) -> Make:
    def make(rng: np.random.Generator) -> Any:
        array = _bytes(rng, dtype, int(np.prod(shape))).reshape(shape)
        if order == "strided":
            return np.repeat(array, 2, axis=-1)[..., ::2]
        return np.asarray(array, order="F" if order == "fortran" else "C")

    return make


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], transposed: bool) -> Make:
    def make(rng: np.random.Generator) -> Any:
        count = int(np.prod(shape)) * dtype.itemsize
        if not count:
            return torch.empty(shape, dtype=dtype)
        raw = _bytes(rng, np.dtype(np.bool_ if dtype is torch.bool else np.uint8), count)
        tensor = torch.from_numpy(raw).view(dtype).reshape(shape)
        return tensor.mT.contiguous().mT if transposed and len(shape) > 1 else tensor

    return make


def _text(kind: type) -> Make:
    return lambda rng: kind(rng.bytes(3)) if kind is bytes else str(rng.integers(1000))


_shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
_stored: st.SearchStrategy[Make] = st.one_of(
    st.builds(_array, st.sampled_from(_NUMPY), _shapes.filter(bool), st.sampled_from(["plain", "fortran", "strided"])),
    st.builds(_tensor, st.sampled_from(_TORCH), _shapes, st.booleans()),
    st.sampled_from(sorted(_SCALARS)).map(_SCALARS.__getitem__),
)
_leaves = _stored | st.builds(_text, st.sampled_from([str, bytes]))


def _nest(children: st.SearchStrategy[Make]) -> st.SearchStrategy[Make]:
    several = st.lists(children, min_size=1, max_size=3)
    keys = st.text("abc", max_size=2) | st.integers(0, 3)
    return st.one_of(
        st.dictionaries(keys, children, max_size=3).map(
            lambda parts: lambda rng: {key: make(rng) for key, make in parts.items()}
        ),
        several.map(lambda parts: lambda rng: [make(rng) for make in parts]),
        several.map(lambda parts: lambda rng: tuple(make(rng) for make in parts)),
        st.tuples(children, children).map(lambda two: lambda rng: Pair(two[0](rng), two[1](rng))),
    )


# one leaf that is stored, whatever else: a sample of strings alone has no layout
_samples = st.one_of(
    _stored,
    st.tuples(_stored, st.recursive(_leaves, _nest, max_leaves=6)).map(
        lambda two: lambda rng: {"stored": two[0](rng), "rest": two[1](rng)}
    ),
)


@settings(deadline=None, max_examples=200)
@given(_samples, st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_rows_make_the_batch_of_default_collate(make: Make, rows: int, seed: int) -> None:
    """Structure, container types, dtypes, shapes and bytes; rows written in any order, between other data."""
    rng = np.random.default_rng(seed)
    samples = [make(rng) for _ in range(rows)]
    layout = Layout.of(samples[0])
    assert layout is not None
    layout = pickle.loads(pickle.dumps(layout))
    nbytes = layout.offsets(rows)[1]
    slab = np.full(64 + nbytes + 64, 0xEE, np.uint8)
    views = layout.views(slab, 64, rows)
    write = layout.writer(views)
    objects: list[Any] = [None] * rows
    for row in rng.permutation(rows).tolist():
        objects[row] = write(row, samples[row])
    batch = layout.batch(slab[64 : 64 + nbytes], rows, [each or [] for each in objects])
    assert same(batch, default_collate(samples))
    for row, sample in enumerate(samples):
        assert same(layout.read(views, row, objects[row]), sample)
    assert (slab[:64] == 0xEE).all() and (slab[64 + nbytes :] == 0xEE).all()
    if layout.stacks:
        slab[:] = 0xEE
        for at in (0, rows // 2):
            assert layout.write_rows(views, at, samples[at:]) and layout.write_rows(views, 0, samples[:at] or samples)
        assert same(layout.batch(slab[64 : 64 + nbytes], rows, [[]] * rows), default_collate(samples))
        assert (slab[:64] == 0xEE).all() and (slab[64 + nbytes :] == 0xEE).all()


_REFUSED = {
    "nothing": None,
    "strings alone": {"a": "x", "b": [b"y"]},
    "zero-dimensional array": np.array(1.0),
    "array of objects": np.array([1, "x"], object),
    "big-endian array": np.zeros(2, ">f4"),
    "reversed array": np.arange(3)[::-1],
    "records": np.zeros(2, [("a", "f4")]).view(np.recarray),
    "unsigned scalar": np.uint64(3),
    "empty list": [torch.zeros(1), []],
    "sparse tensor": torch.eye(2).to_sparse(),
    "tensor with gradient": torch.ones(2, requires_grad=True),
    "conjugate view": torch.ones(2, dtype=torch.complex64).conj(),
    "a dtype that NumPy lacks": torch.zeros(2, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("sample", _REFUSED.values(), ids=_REFUSED.keys())
def test_what_is_not_simply_stacked_has_no_layout(sample: Any) -> None:
    """It then travels as an object, and default_collate itself decides."""
    assert Layout.of(sample) is None


_LIKE = {"x": np.zeros((2, 3), np.float32), "t": torch.zeros(2), "n": 1, "s": "text", "p": Pair(1.0, [True])}
_CHANGES: list[dict[str, Any]] = [
    *({"x": other} for other in (np.zeros((3, 2), "f4"), np.zeros((1, 3), "f4"), np.zeros((2, 3)), torch.zeros(2, 3))),
    *({"t": other} for other in (torch.zeros(2, dtype=torch.float64), torch.zeros(2, requires_grad=True))),
    *({"n": other} for other in (1.0, True, np.int64(1), 1 << 63)),
    {"p": (1.0, [True])},  # a tuple in the place of a namedtuple
    {"y": 0},  # a further key
]


_TENSORS = {name: _LIKE[name] for name in ("t", "n")}
_OTHERS: list[tuple[Any, Any]] = [
    *((_LIKE, {**_LIKE, **change}) for change in _CHANGES),
    *((_TENSORS, {**_TENSORS, **change}) for change in _CHANGES if not change.keys() - _TENSORS.keys()),
    *((np.ones(3, np.float32), other) for other in (np.zeros(3), np.zeros(2, "f4"), np.float32(1), torch.zeros(3))),
    (np.ones(3, np.float32), np.zeros(6, np.float32)[::-2]),
    *((torch.ones(3), other) for other in (torch.zeros(3).double(), torch.zeros(2), np.zeros(3, "f4"), 1.0)),
    *((torch.ones(3), torch.zeros(3, **how)) for how in ({"requires_grad": True}, {"device": "meta"})),
    (torch.ones(3), torch.zeros(3).to_sparse()),
    (torch.ones(3), torch.nn.Parameter(torch.zeros(3))),
]


@pytest.mark.parametrize(("like", "other"), _OTHERS)
def test_a_sample_that_differs_is_refused(like: Any, other: Any) -> None:
    """By the short cuts for single arrays and tensors, and for several samples, too."""
    layout = Layout.of(like)
    assert layout is not None
    views = layout.views(np.zeros(layout.offsets(2)[1], np.uint8), 0, 2)
    write = layout.writer(views)
    assert write(0, like) == (["text"] if like is _LIKE else None)
    with pytest.raises(Mismatch):
        write(1, other)
    if layout.stacks:
        assert layout.write_rows(views, 0, [like, like])
        assert not layout.write_rows(views, 0, [like, other]) and not layout.write_rows(views, 0, [other, other])
