"""A DALI graph's outputs, as arrays that belong to whoever gets them, and what must not be let go of before that is so.

On a GPU an output is copied, on the lane's stream and without waiting, from DALI's memory into one block of PyTorch's:
one copy for a micro-batch, whether its samples are of one shape or of many. DALI's own tensors are held until an event
behind the copies has come to pass, and are let go of by the lane's thread. Rejected: DLPack, which copies nothing. Its
deleter runs in whichever thread drops the last batch that has such a row, the training loop say, and may wait for the
whole device there, which also breaks a CUDA graph that is being captured; and rows that are kept keep DALI's memory.

On the CPU outputs are views, which keep their own memory alive. It is never that of a sample's field, although inputs
are fed without a copy and an operator may hand its input through: inputs are lists of separate arrays, or were stacked,
and an output is one block, so DALI copies (the tests hold that).
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
    """One output of a run, ``TensorListCPU`` or ``TensorListGPU``: a micro-batch of one field."""

    @property
    def dtype(self) -> object:
        """One of DALI's types."""

    def shape(self) -> Iterable[Sequence[int]]:
        """Of each sample."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> object: ...

    def copy_to_external(self, into: object, stream: object = None, *, non_blocking: bool = False) -> None:
        """Copy all samples, one behind the other."""


def on_host(output: Output) -> Iterator[npt.NDArray[Value]]:
    """The samples of an output on the CPU."""
    return (np.asarray(output[n]) for n in range(len(output)))


def on_device(output: Output, device: str, stream: Stream | None) -> Sequence[Value]:
    """The samples of an output as torch tensors on ``device`` ("cpu" in tests). With ``stream``, the calling thread's
    current one, they are ready there, and ``output`` must stay until then; without one they are ready."""
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


class Kept:
    """What a device still reads: inputs, and outputs that are being copied. For one thread, which also lets them go.

    ``len``: of how many runs there is something.
    """

    def __init__(self) -> None:
        self._runs: deque[tuple[Event | None, tuple[object, ...]]] = deque()

    def __len__(self) -> int:
        return len(self._runs)

    def keep(self, event: Event | None, *things: object) -> None:
        """Until ``event`` has come to pass; where it is None (the run has failed), until that of a later run has."""
        self._runs.append((event, things))

    def sweep(self) -> None:
        """Let go of what the device is through with; never waits."""
        through = 0
        for number, (event, _) in enumerate(self._runs, 1):
            if event is not None:
                if not _passed(event):
                    break
                through = number
        for _ in range(through):
            self._runs.popleft()

    def close(self) -> None:
        """Wait for the device, and let go of everything. Idempotent."""
        while self._runs:
            event, _ = self._runs[0]
            if event is not None:
                with contextlib.suppress(Exception):  # as below
                    event.synchronize()
            self._runs.popleft()


def _passed(event: Event) -> bool:
    """Whether the device has come to it. A device that has failed comes to nothing, and reads nothing any more."""
    try:
        return bool(event.query())
    except Exception:
        return True
