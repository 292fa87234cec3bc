"""How fast values come to the device, measured once: what a transfer costs until it has been measured itself."""

from __future__ import annotations

from contextlib import nullcontext
from time import perf_counter

import torch

from minato_gpu.memory.accelerator import Accelerator

_BYTES = 1 << 22
_REPEATS = 8  # the thread may have to wait for a core


def measured_rate(accelerator: Accelerator | None) -> float:
    """Bytes per second to the device; where that is the host itself (None), at which memory is copied."""
    source = torch.ones(_BYTES, dtype=torch.uint8)
    with nullcontext() if accelerator is None else accelerator.running(accelerator.stream()):
        into = torch.empty_like(source) if accelerator is None else accelerator.empty(_BYTES)
        seconds = min(_seconds(accelerator, into, source) for _ in range(_REPEATS))
    return _BYTES / max(seconds, 1e-9)


def _seconds(accelerator: Accelerator | None, into: torch.Tensor, source: torch.Tensor) -> float:
    begin = perf_counter()
    if accelerator is None:
        into.copy_(source)
    else:
        accelerator.copy(into, source)
        accelerator.event().synchronize()
    return perf_counter() - begin
