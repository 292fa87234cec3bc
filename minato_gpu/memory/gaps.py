"""Exact copies of arrays and tensors whose elements do not lie side by side: with gaps, mirrored, or read-only.

A copy of such a view usually has no gaps. It has equal elements, but sums of it may have other last bits, since they
are added in another order; and it can be written to. Here the elements are pickled without the gaps; what is loaded has
the original's strides, its alignment and its flag, and reaches over as much memory as the original did.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from minato_gpu.samples import Value

_ALIGN = 64
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class _Exact:
    """Pickles as what it is a copy of."""

    def __init__(self, array: NDArray[Value], dtype: torch.dtype | None) -> None:
        self._parts = array.copy("K"), array.strides, array.ctypes.data % _ALIGN, array.flags.writeable, dtype

    def __reduce__(self) -> tuple[Value, ...]:
        return _laid, self._parts


def exact_copies(value: Value) -> dict[int, Value]:
    """Of what needs them of the arrays and tensors in a value, a container or containers of those: by ``id``, as
    ``copy.deepcopy`` takes them. They are good for pickling, and turn into arrays and tensors by that alone."""
    return {id(each): made for each in _leaves(value) if (made := _exact(each)) is not None}


def _leaves(value: Value) -> Iterator[Value]:
    if isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)
    else:
        yield value


def _exact(value: Value) -> _Exact | None:
    """None where a usual copy is as good, or nothing is known of the type."""
    if type(value) is np.ndarray and not value.dtype.hasobject:
        flags = value.flags
        is_plain = flags.writeable and flags.aligned and value.strides == np.empty_like(value).strides
        return None if is_plain else _Exact(value, None)
    if type(value) is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided:
        is_odd = value.is_nested or value.is_quantized or value.is_conj() or value.is_neg() or value.requires_grad
        if is_odd or value.__dict__ or value.stride() == torch.empty_like(value).stride():
            return None
        return _Exact(value.view(_CARRIERS[value.itemsize]).numpy(), value.dtype)
    return None


def _laid(
    dense: NDArray[Value], strides: tuple[int, ...], address: int, writeable: bool, dtype: torch.dtype | None
) -> Value:
    array = dense
    if strides != dense.strides or dense.ctypes.data % dense.dtype.alignment != address % dense.dtype.alignment:
        reach = [max(0, size - 1) * step for size, step in zip(dense.shape, strides, strict=True)]
        memory = np.empty(sum(map(abs, reach)) + dense.itemsize + _ALIGN, np.uint8)
        first = -sum(each for each in reach if each < 0)  # the first element may be the last in memory
        first += (address - memory.ctypes.data - first) % _ALIGN
        array = np.ndarray(dense.shape, dense.dtype, memory.data, first, strides)
        array[...] = dense
    array.flags.writeable = writeable
    return array if dtype is None else torch.from_numpy(array).view(dtype)
