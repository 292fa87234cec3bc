"""A GPU's stream that goes on when the test says so, however long that takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from minato_gpu.device.accelerator import Accelerator

_SOURCE = r'extern "C" __global__ void wait(volatile int* open) { while (*open == 0) {} }'


@contextmanager
def held_up(device: Accelerator, stream: Any) -> Iterator[None]:
    """What is issued on the stream within runs at the end of it. One thread of the GPU waits for the host's word."""
    import cupy

    word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    wait = cupy.RawKernel(_SOURCE, "wait")
    wait.compile()  # loading a kernel waits for the whole device
    with device.working(stream):
        wait((1,), (1,), (np.uint64(word.data_ptr()),))
    try:
        yield
    finally:
        word[0] = 1
        stream.synchronize()
