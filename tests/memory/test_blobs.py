"""Blobs: any object through shared memory and back, arrays and tensors without another copy."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minato_gpu.memory import blobs
from tests.support.same import same

_ODD = re.compile(r"torch\.(q|bits|u?int[1-7]$)")  # torch itself can hardly copy these
_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype) and not _ODD.match(str(d))}, key=str)
_HALVES = pytest.mark.filterwarnings("ignore:(ComplexHalf|BComplex32) support is experimental:UserWarning")


def there(value: Any) -> tuple[Any, np.ndarray[Any, Any]]:
    """The value after its journey, and the memory that it lies in."""
    dumped = blobs.dump(value)
    memory = np.full(dumped.nbytes, 0xEE, np.uint8)
    blobs.write(memory.data, dumped)
    return blobs.load(memory), memory


class Tagged(torch.Tensor):
    """A tensor class of the user's own."""


@_HALVES
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    """Whole, zero-dimensional, empty, strided, transposed and expanded."""
    whole = torch.arange(6 * 16, dtype=torch.uint8).view(torch.bool if dtype is torch.bool else torch.uint8)
    if dtype is torch.bool:
        whole = torch.arange(96) % 3 == 0
    elif whole.dtype is not dtype:
        whole = whole.view(dtype)
    square = whole[:6].view(2, 3)
    values = [whole, whole[0], whole[2:5], square.t(), whole[::2], whole[:1].expand(4), torch.empty(0, 3, dtype=dtype)]
    got, _ = there(values)
    assert same(got, values)
    for value in values:  # each by itself too: the ones above share one storage
        assert same(there(value)[0], value)


_trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(),
    lambda parts: (
        st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=3), parts, max_size=3) | st.tuples(parts, parts)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=50)
@given(_trees, st.lists(st.integers(0, 5000), max_size=4))
def test_nested_objects_with_arrays_of_any_length(tree: Any, lengths: list[int]) -> None:
    rng = np.random.default_rng(0)
    value = {"tree": tree, "arrays": [rng.integers(0, 256, n, dtype=np.uint8) for n in lengths]}
    value["tensors"] = [torch.from_numpy(array.copy()) for array in value["arrays"]]
    assert same(there(value)[0], value)


def test_a_memoryview_cannot_be_sent() -> None:
    with pytest.raises(TypeError, match=r"a memoryview cannot leave its worker; return bytes\(view\)"):
        there([memoryview(b"ab")])


@pytest.mark.parametrize("dtype", [np.uint8, object])
def test_a_read_only_array_can_be_written_to(dtype: Any) -> None:
    value = np.arange(6, dtype=dtype).reshape(3, 2).T
    value.flags.writeable = False
    got = there([value, value])[0]
    assert same(got, [value, value])
    assert got[0] is got[1] and got[0].flags.writeable and got[0].strides == value.strides


@pytest.mark.parametrize(
    "value", [torch.nn.Parameter(torch.ones(3)), torch.tensor([1 + 2j]).conj(), torch.ones(2).as_subclass(Tagged)]
)
def test_tensors_that_are_more_than_their_elements(value: torch.Tensor) -> None:
    got, _ = there(value)
    assert same(got, value) and got.is_leaf == value.is_leaf


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc], ids=str)
def test_compressed_sparse_tensors(layout: torch.layout) -> None:
    block = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    value = torch.eye(4).to_sparse(layout=layout, blocksize=block)
    assert same(there(value)[0], value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_torch_multiprocessing_sends_besides() -> None:
    parts = [torch.ones(2), torch.arange(3.0)]
    for layout in (torch.jagged, torch.strided):
        value = torch.nested.as_nested_tensor(parts, layout=layout)
        assert all(torch.equal(one, other) for one, other in zip(there(value)[0].unbind(), parts, strict=True))
    assert list(there(torch.arange(4, dtype=torch.uint8).untyped_storage())[0]) == [0, 1, 2, 3]


def test_a_tensor_and_its_views_still_share_memory() -> None:
    base = torch.arange(12.0)
    got, _ = there({"base": base, "again": base, "row": base.view(3, 4)[1], "back": base.view(3, 4).t()})
    assert same(got, {"base": base, "again": base, "row": base.view(3, 4)[1], "back": base.view(3, 4).t()})
    small = torch.arange(6, dtype=torch.uint8)
    assert same(there([small, small[:4].view(torch.int32)])[0], [small, small[:4].view(torch.int32)])
    assert got["again"] is got["base"]
    got["base"][5] = 100
    assert got["row"][1] == 100 and got["back"][1, 1] == 100


@pytest.mark.parametrize(
    "value", [np.arange(100_000.0), torch.arange(100_000.0), torch.nn.Parameter(torch.arange(100_000.0))]
)
def test_large_data_are_read_where_they_lie(value: Any) -> None:
    """Without a copy, on addresses that vector instructions like, and writable."""
    got, memory = there([1, {"x": value}])
    array = got[1]["x"] if isinstance(value, np.ndarray) else got[1]["x"].detach().numpy()
    assert np.shares_memory(array, memory)
    assert (array.ctypes.data - memory.ctypes.data) % 64 == 0
    array[0] = 77
    assert array.flags.writeable


def test_a_tensor_inside_a_graph_is_refused_with_advice() -> None:
    with pytest.raises(RuntimeError, match=r"not a leaf.*detach\(\)"):
        blobs.dump([torch.ones(2, requires_grad=True) * 2])
