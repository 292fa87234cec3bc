"""Exact copies of arrays and tensors whose elements do not lie side by side: with gaps, mirrored, or read-only.

A copy of such a view usually has no gaps. It has equal elements, but sums of it may have other last bits, since they
are added in another order; and it can be written to. Here the elements are pickled without the gaps; what is loaded has
the original's strides, its alignment and its flag, and reaches over as much memory as the original did. Arrays, memory
maps and tensors are made so; of a few others there is no exact copy, and that is told. What an object's own code copies
or pickles (``__deepcopy__``, or views that ``__getstate__`` makes) is as that code and usual copies leave it.
"""

from __future__ import annotations

import pickle

import numpy as np
import torch
from numpy.typing import NDArray

from minato_gpu.memory.blobs import strided_parts
from minato_gpu.samples import Value

_ALIGN = 64
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class _Exact:
    """Pickles as what it is a copy of."""

    def __init__(self, of: Value, array: NDArray[Value], dtype: torch.dtype | None) -> None:
        """``array``: what lies in the memory of an array, or a tensor of this ``dtype``."""
        self._of = of  # which lives on: nothing else may have its id
        self._kind = np.memmap if isinstance(of, np.memmap) else dtype
        self._parts = array.copy("K"), array.strides, array.ctypes.data % _ALIGN, array.flags.writeable

    def __reduce__(self) -> tuple[Value, ...]:
        return _laid, (*self._parts, self._kind)


def exact_copies(value: Value) -> dict[int, Value]:
    """Of what needs them of the arrays and tensors in a value, wherever pickling finds them: by ``id``, as
    ``copy.deepcopy`` takes them. They are good for pickling, and turn into arrays and tensors by that alone.

    Raises TypeError where there is one of which neither they nor usual copies are exact: of a class of which nothing is
    known, say, or conjugated; and whatever pickling the value raises."""
    search = _Search(_Nowhere(), 5)
    search.dump(value)
    return search.found


class _Nowhere:
    def write(self, data: object) -> None:
        """Nobody reads it."""


class _Search(pickle.Pickler):
    """Sees all that a value consists of; of arrays and tensors it writes nothing."""

    def __init__(self, *arguments: Value) -> None:
        super().__init__(*arguments)
        self.found: dict[int, Value] = {}

    def reducer_override(self, obj: Value) -> Value:
        if isinstance(obj, np.ndarray):
            exact, more = _exact_array(obj), obj.tolist() if obj.dtype.hasobject else None
        elif isinstance(obj, torch.Tensor):
            exact, more = _exact_tensor(obj), obj.__dict__
        else:
            return NotImplemented
        if exact is not None:
            self.found[id(obj)] = exact
        return object, (), more


def _exact_array(array: NDArray[Value]) -> _Exact | None:
    """None where a usual copy is as good."""
    known = type(array) in (np.ndarray, np.memmap)
    plain, flags = np.asarray(array), array.flags
    if known and flags.writeable and flags.aligned and array.strides == np.empty_like(plain).strides:
        return None
    if not known or array.dtype.hasobject:
        raise TypeError(f"no copy of this {type(array).__name__} is exact")
    return _Exact(array, plain, None)


def _exact_tensor(tensor: torch.Tensor) -> _Exact | None:
    """None where a usual copy is as good."""
    known = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_conj() and not tensor.is_neg()
    if known and all(part.stride() == torch.empty_like(part).stride() for part in strided_parts(tensor)):
        return None
    is_odd = tensor.is_nested or tensor.is_quantized or tensor.requires_grad or tensor.layout is not torch.strided
    if not known or is_odd or tensor.device.type != "cpu" or type(tensor) is not torch.Tensor or tensor.__dict__:
        raise TypeError(f"no copy of this {type(tensor).__name__} is exact")
    return _Exact(tensor, tensor.view(_CARRIERS[tensor.itemsize]).numpy(), tensor.dtype)


def _laid(dense: NDArray[Value], strides: tuple[int, ...], address: int, writeable: bool, kind: Value) -> Value:
    """``kind``: a class of arrays, or a dtype of tensors; None for what is just an array."""
    array = dense
    if strides != dense.strides or dense.ctypes.data % dense.dtype.alignment != address % dense.dtype.alignment:
        reach = [max(0, size - 1) * step for size, step in zip(dense.shape, strides, strict=True)]
        memory = np.empty(sum(map(abs, reach)) + dense.itemsize + _ALIGN, np.uint8)
        first = -sum(each for each in reach if each < 0)  # the first element may be the last in memory
        first += (address - memory.ctypes.data - first) % _ALIGN
        array = np.ndarray(dense.shape, dense.dtype, memory.data, first, strides)
        array[...] = dense
    array.flags.writeable = writeable
    if isinstance(kind, torch.dtype):
        return torch.from_numpy(array).view(kind)
    return array if kind is None else array.view(kind)
