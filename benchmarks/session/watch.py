"""What a device and its host are doing while a loader is measured: NVML ten times a second, and CPU seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from minato_gpu.device.nvml import handle_of, library

_PERIOD_S = 0.1


@dataclass
class Readings:
    """Of everybody's work on the device. ``gpu``, ``jpeg``: shares of time, 0 to 1, that it and its JPEG engine were
    busy; ``nbytes``: of its memory in use."""

    gpu: list[float] = field(default_factory=list)
    jpeg: list[float] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        """``gpu_busy``, ``jpeg_engine_busy`` (means) and ``gpu_bytes`` (the most), as far as NVML tells them."""
        found: dict[str, float] = {}
        if self.gpu:
            found["gpu_busy"] = float(np.mean(self.gpu))
        if self.jpeg:
            found["jpeg_engine_busy"] = float(np.mean(self.jpeg))
        if self.nbytes:
            found["gpu_bytes"] = max(self.nbytes)
        return found


@contextmanager
def watched_gpu(device: str) -> Iterator[Readings]:
    """Reads NVML until the end of the context; nothing where there is no GPU or no NVML."""
    readings = Readings()
    read = _reader(readings) if device == "cuda" else None
    if read is None:
        yield readings
        return
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(_PERIOD_S):
            read()

    thread = threading.Thread(target=watch, name="nvml")
    thread.start()
    try:
        yield readings
    finally:
        stop.set()
        thread.join()


def _reader(readings: Readings) -> Callable[[], None] | None:
    """A function that takes one reading of the current device; None where NVML is not there, or does not know it."""
    nvml: Any = library()
    if nvml is None:
        return None
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    try:
        nvml.nvmlInit()
        handle = handle_of(nvml, uuid)
    except nvml.NVMLError:
        return None

    def read() -> None:
        with suppress(nvml.NVMLError):
            readings.nbytes.append(int(nvml.nvmlDeviceGetMemoryInfo(handle).used))
            readings.gpu.append(nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
            readings.jpeg.append(nvml.nvmlDeviceGetJpgUtilization(handle)[0] / 100)

    return read
