"""Reads a device's utilisation and memory from NVML; returns None without NVML.

``pynvml`` is the module of the package nvidia-ml-py, which the cuda extras install. NVML is opened for each reading,
which takes about a millisecond and happens only in ``stats()``.
"""

from __future__ import annotations

import importlib
import warnings
from contextlib import suppress
from types import ModuleType


def reading(uuid: str) -> dict[str, float | int | None] | None:
    """Returns ``utilisation``, ``memory_used_bytes`` and ``memory_total_bytes`` of the device with this UUID; None
    where NVML or the device is not found.

    ``utilisation`` is the share of the last sampling period, 0 to 1, over all processes; None where NVML does not
    measure it, as for a MIG part of a GPU.
    """
    nvml = library()
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
        try:
            handle = handle_of(nvml, uuid)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            return {
                "utilisation": _utilisation(nvml, handle),
                "memory_used_bytes": int(memory.used),
                "memory_total_bytes": int(memory.total),
            }
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return None


def handle_of(nvml: ModuleType, uuid: str) -> object:
    """Returns NVML's handle of the GPU with this UUID, or of the MIG part, which has a UUID of its own in CUDA and
    PyTorch, too. NVML must be open. Raises NVMLError where it is unknown."""
    with suppress(nvml.NVMLError):
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


def _utilisation(nvml: ModuleType, handle: object) -> float | None:
    try:
        return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
    except nvml.NVMLError:
        return None


def library() -> ModuleType | None:
    """Returns the module pynvml; None where it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a deprecated package of the same name complains on import
            return importlib.import_module("pynvml")
    except ImportError:
        return None
