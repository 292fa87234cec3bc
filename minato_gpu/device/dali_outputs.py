"""Turns a DALI graph's outputs into arrays that their receiver owns, and holds DALI's memory until that is done.

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

import contextlib
import ctypes
import importlib
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from minato_gpu.device.accelerator import Event, Stream
from minato_gpu.memory.layout import torch_dtype
from minato_gpu.samples import Value


class Output(Protocol):
    """One output of a run, ``TensorListCPU`` or ``TensorListGPU``: one field of a micro-batch."""

    @property
    def dtype(self) -> object:
        """One of DALI's types."""

    def shape(self) -> Iterable[Sequence[int]]:
        """Returns the shape of each sample."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> object: ...

    def copy_to_external(self, into: object, stream: object = None, *, non_blocking: bool = False) -> None:
        """Copies all samples one after the other to the address ``into``."""


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


class HeldUntilRead:
    """References to what a device still reads: inputs, and outputs that are being copied. For one thread, which also
    drops them. ``len`` counts the runs."""

    def __init__(self) -> None:
        self._runs: deque[tuple[Event | None, tuple[object, ...]]] = deque()

    def __len__(self) -> int:
        return len(self._runs)

    def hold(self, event: Event | None, *things: object) -> None:
        """Holds ``things`` until ``event`` has passed; if it is None (the run failed), until the event of a later run
        has."""
        self._runs.append((event, things))

    def sweep(self) -> None:
        """Drops what the device has finished reading; never waits."""
        passed = 0
        for number, (event, _) in enumerate(self._runs, 1):
            if event is not None:
                if not _has_passed(event):
                    break
                passed = number
        for _ in range(passed):
            self._runs.popleft()

    def close(self) -> None:
        """Waits for the device and drops everything. Idempotent."""
        while self._runs:
            event, _ = self._runs[0]
            if event is not None:
                with contextlib.suppress(Exception):  # a failed device reads nothing
                    event.synchronize()
            self._runs.popleft()


def _has_passed(event: Event) -> bool:
    """Returns True when the event has passed or the device has failed: then it reads nothing any more."""
    try:
        return bool(event.query())
    except Exception:
        return True
