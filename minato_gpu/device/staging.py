"""Copies values between host and device through pinned memory, without blocking the calling thread.

A copy from or to pageable memory blocks its thread until it has ended; ``torch.tensor(..., device=...)`` even waits for
all earlier work of the stream. So ``upload`` joins a sample's arrays in pinned memory and copies them at once;
``Download`` copies a micro-batch's tensors into one piece of pinned memory, by one call that releases the interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from minato_gpu.device.accelerator import Accelerator
from minato_gpu.memory.arena import round_up
from minato_gpu.memory.layout import torch_dtype
from minato_gpu.samples import Value

ALIGN = 16  # bytes, of each value; enough for any element type


def upload(accelerator: Accelerator, arrays: Sequence[NDArray[Value]]) -> list[torch.Tensor]:
    """Returns the arrays as tensors on the device, for later work of the current stream; the arrays may change at once.

    The tensors share one block of memory. Raises TypeError for a dtype that torch does not have.
    """
    dtypes = [torch_dtype(array.dtype) for array in arrays]
    places, total = side_by_side([array.nbytes for array in arrays])
    if not total:
        return [accelerator.empty(0).view(one).view(a.shape) for one, a in zip(dtypes, arrays, strict=True)]
    host, device = accelerator.host(total), accelerator.empty(total)
    for at, array in zip(places, arrays, strict=True):
        into = host.numpy()[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(into, array)
    accelerator.copy([device], [host])
    parts = zip(places, arrays, dtypes, strict=True)
    return [device[at : at + array.nbytes].view(dtype).view(array.shape) for at, array, dtype in parts]


class Download:
    """Tensors of a device on their way to pinned memory; the constructor issues the copies on the current stream."""

    def __init__(self, accelerator: Accelerator, tensors: Sequence[torch.Tensor]) -> None:
        places, total = side_by_side([tensor.nbytes for tensor in tensors])
        host = accelerator.host(total)
        pairs = zip(places, tensors, strict=True)
        self._parts = [host[at : at + one.nbytes].view(one.dtype).view(one.shape) for at, one in pairs]
        self._tensors = tensors  # they are kept until ``arrays``
        accelerator.copy(self._parts, tensors)

    def values(self) -> list[NDArray[Value]]:
        """Returns the arrays as views of pinned memory. To be called after an event behind the copy has passed."""
        return [part.numpy() for part in self._parts]

    def arrays(self) -> list[NDArray[Value]]:
        """Returns each array in memory of its own, and frees the source tensors. To be called as ``values``."""
        arrays = [np.array(value) for value in self.values()]
        self._tensors = ()
        return arrays


def side_by_side(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns the offsets of values of these sizes in one block, multiples of ``ALIGN``, and its size. In bytes."""
    places, end = [], 0
    for size in sizes:
        places.append(round_up(end, ALIGN))
        end = places[-1] + size
    return places, end
