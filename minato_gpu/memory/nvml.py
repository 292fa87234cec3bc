"""What NVML says about a device: how busy it is, and its memory. Absent NVML is no error: there is then nothing to say.

``pynvml`` is the module of the package nvidia-ml-py, which the cuda extras bring. NVML is opened for each reading: it
takes about a millisecond, is asked for by ``stats()`` alone, and leaves nothing open.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any


def reading(uuid: str) -> dict[str, float | int] | None:
    """``utilisation`` (share of the last sampling period, 0 to 1, of everybody's work), ``memory_used_bytes`` and
    ``memory_total_bytes`` of the device with this UUID ("GPU-..."); None where NVML or the device is not to be had."""
    nvml = _library()
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return {
            "utilisation": nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "memory_used_bytes": int(memory.used),
            "memory_total_bytes": int(memory.total),
        }
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _library() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a deprecated package of the same name complains on import
            return importlib.import_module("pynvml")
    except ImportError:
        return None
