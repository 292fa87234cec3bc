"""What NVML says about a device: how busy it is, and its memory. Absent NVML is no error: there is then nothing to say.

``pynvml`` is the module of the package nvidia-ml-py, which the cuda extras bring. NVML is opened for each reading: it
takes about a millisecond, is asked for by ``stats()`` alone, and leaves nothing open.
"""

from __future__ import annotations

import importlib
import warnings
from contextlib import suppress
from types import ModuleType

_KINDS = ("GPU", "MIG")
"""A part of a GPU that is divided (MIG) has a UUID of its own, which CUDA and PyTorch give as they do a whole GPU's."""


def reading(uuid: str) -> dict[str, float | int | None] | None:
    """``utilisation`` (share of the last sampling period, 0 to 1, of everybody's work; None where NVML does not measure
    it, as for a part of a GPU), ``memory_used_bytes`` and ``memory_total_bytes`` of the device with this UUID; None
    where NVML or the device is not to be had."""
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
    """The device with this UUID, a whole GPU or a part of one, while NVML is open. Raises NVMLError where it knows
    none."""
    for kind in _KINDS[:-1]:
        with suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(f"{kind}-{uuid}")
    return nvml.nvmlDeviceGetHandleByUUID(f"{_KINDS[-1]}-{uuid}")


def _utilisation(nvml: ModuleType, handle: object) -> float | None:
    try:
        return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
    except nvml.NVMLError:
        return None


def library() -> ModuleType | None:
    """The module pynvml; None where it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a deprecated package of the same name complains on import
            return importlib.import_module("pynvml")
    except ImportError:
        return None
