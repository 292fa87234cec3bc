"""Turns a DALI graph's outputs into arrays that their receiver owns.

On a GPU an output is copied asynchronously on the lane's stream from DALI's memory into one block of PyTorch's: one
copy for a micro-batch, whatever the samples' shapes. DALI's tensors are held until an event after the copies has
passed, and freed by the lane's thread.

Rejected: DLPack, which would copy nothing. Its deleter runs in the thread that drops the last batch with such a row,
for instance the training loop, where it may wait for the whole device and break the capture of a CUDA graph; and a row
that is kept keeps DALI's memory.

On the CPU outputs are views, which keep their memory alive. That memory is never an input's, although inputs are fed
without a copy and an operator may pass its input through: inputs are separate arrays or were stacked, an output is one
block, so DALI copies (a test holds this).
"""

from __future__ import annotations

import ctypes
import importlib
import math
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from minato_gpu.device.accelerator import Stream
from minato_gpu.memory.layout import torch_dtype
from minato_gpu.samples import Value

Output = Value
"""One output of a run, ``TensorListCPU`` or ``TensorListGPU``: one field of a micro-batch."""


def on_host(output: Output) -> Iterator[npt.NDArray[Value]]:
    """Yields the samples of an output on the CPU."""
    return (np.asarray(output[n]) for n in range(len(output)))


def on_device(output: Output, device: str, stream: Stream | None) -> Sequence[Value]:
    """Returns the samples of an output as torch tensors on ``device`` ("cpu" in tests).

    With ``stream``, which must be the current one, they are ready on that stream and ``output`` must live until then.
    Without a stream they are ready on return.
    """
    shapes = list(output.shape())
    alike = shapes.count(shapes[0]) == len(shapes)
    sizes = [math.prod(shape) for shape in shapes[: 1 if alike else None]]
    block = torch.empty(sizes[0] * len(shapes) if alike else sum(sizes), dtype=_dtype(output.dtype), device=device)
    into = ctypes.c_void_p(block.data_ptr())
    if block.numel() and stream is not None:
        output.copy_to_external(into, ctypes.c_void_p(stream.cuda_stream), non_blocking=True)
    elif block.numel():
        output.copy_to_external(into)
    if alike:
        rows: Sequence[Value] = block.view(len(shapes), *shapes[0]).unbind(0)
        return rows
    return [part.view(tuple(shape)) for part, shape in zip(block.split(sizes), shapes, strict=True)]


@cache
def _dtype(of_dali: object) -> torch.dtype:
    types = importlib.import_module("nvidia.dali.types")
    return torch_dtype(np.dtype(types.to_numpy_type(of_dali)))
