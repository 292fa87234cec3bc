"""NVML's figures where it is, nothing where it is not."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from minato_gpu.memory import nvml


class _Error(Exception):
    pass


class _Library:
    """A module ``pynvml``. ``fails``: the function that raises; ``kind``: of the device, as its UUID begins."""

    NVMLError = _Error

    def __init__(self, fails: str = "", kind: str = "GPU-") -> None:
        self.fails = fails
        self.kind = kind
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if name == self.fails:
                raise _Error(name)
            self.open += {"nvmlInit": 1, "nvmlShutdown": -1}.get(name, 0)
            if name == "nvmlDeviceGetHandleByUUID":
                if not str(arguments[0]).startswith(self.kind):
                    raise _Error("not found")
                return arguments[0]
            return SimpleNamespace(gpu=37, used=3 << 30, total=80 << 30)

        return call


def test_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    library = _Library()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    expected = {"utilisation": 0.37, "memory_used_bytes": 3 << 30, "memory_total_bytes": 80 << 30}
    assert nvml.reading("1") == expected
    assert library.open == 0


def test_a_part_of_a_gpu_has_memory_and_no_utilisation(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML knows it by "MIG-" and its UUID, and answers that its utilisation is not supported."""
    library = _Library("nvmlDeviceGetUtilizationRates", "MIG-")
    monkeypatch.setitem(sys.modules, "pynvml", library)
    expected = {"utilisation": None, "memory_used_bytes": 3 << 30, "memory_total_bytes": 80 << 30}
    assert nvml.reading("1") == expected
    assert library.open == 0


@pytest.mark.parametrize("fails", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMemoryInfo"])
def test_no_driver_no_such_device_no_permission(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    library = _Library(fails)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert nvml.reading("1") is None
    assert library.open == 0


def test_no_such_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.reading("1") is None


@pytest.mark.gpu
def test_a_real_device() -> None:
    import torch

    from minato_gpu.memory.accelerator import Accelerator

    found = nvml.reading(Accelerator(torch.device("cuda")).uuid)
    assert found is not None
    used, total = found["memory_used_bytes"], found["memory_total_bytes"]
    assert used is not None and total is not None and used <= total
