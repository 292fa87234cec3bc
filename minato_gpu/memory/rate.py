"""How fast values come to the device, measured once: what a transfer costs until it has been measured itself."""

from __future__ import annotations

from time import perf_counter

import torch

from minato_gpu.memory.accelerator import Accelerator

_BYTES = 1 << 22
_REPEATS = 8  # the thread may have to wait for a core


def measured_rate(accelerator: Accelerator | None) -> float:
    """Bytes per second to the device; where that is the host itself (None), at which memory is copied."""
    source = torch.ones(_BYTES, dtype=torch.uint8)
    seconds: list[float] = []
    if accelerator is None:
        into = torch.empty_like(source)
        for _ in range(_REPEATS):
            begin = perf_counter()
            into.copy_(source)
            seconds.append(perf_counter() - begin)
        return _BYTES / max(min(seconds), 1e-9)
    with accelerator.running(accelerator.stream()):
        into = accelerator.empty(_BYTES)
        for _ in range(_REPEATS):
            begin = perf_counter()
            accelerator.copy(into, source)
            accelerator.event().synchronize()
            seconds.append(perf_counter() - begin)
    return _BYTES / max(min(seconds), 1e-9)
