"""DALI's GPU graphs, computed by its CPU operators.

DALI's Python keeps what it knows of devices, with its own checks; only its compiled part is told "cpu" everywhere, and
its GPU tensors are replaced by those of ``dali_tensors``. Where FAKE_DALI_FAILS is set, every run that has results on
the GPU fails, as nvImageCodec does on some GPUs; where that is ``crash``, the process ends by SIGSEGV.
"""

from __future__ import annotations

import ctypes
import os
import signal
import weakref
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from tests.fake_cuda.dali_tensors import OnDevice, TensorGPU, TensorListGPU
from tests.fake_cuda.runtime import LIBRARY, check

_ERROR = "Error in MIXED operator `nvidia.dali.fn.decoders.image_slice`: nvImageCodec failure: '#8'"
_CPU_ONLY = -99999

_output_devices: weakref.WeakKeyDictionary[Any, list[str]] = weakref.WeakKeyDictionary()  # by OpSpec


def install(backend: Any) -> None:
    """Changes the module ``nvidia.dali.backend_impl``, before anything else of DALI is imported."""
    OnDevice.backend = ModuleType("backend")
    OnDevice.backend.__dict__.update(backend.__dict__)
    _on_cpu(backend.OpSpec)
    backend.TensorGPU, backend.TensorListGPU, backend.Stream = TensorGPU, TensorListGPU, Stream
    backend.Pipeline = _pipeline(backend.Pipeline)
    backend._Operator, backend._Workspace = _operator(backend._Operator), _workspace(backend._Workspace)
    backend._NewThreadPool = _thread_pool(backend._NewThreadPool)
    backend.GetCUDADeviceCount = lambda: 1
    backend.GetCUDACurrentDevice = backend.GetCUDAStreamDevice = lambda *_: 0
    backend.SetCUDACurrentDevice = lambda _: None
    backend.CUDAStreamSynchronize = lambda stream: LIBRARY.cudaStreamSynchronize(stream.handle)


class Stream:
    """A stream, with the attributes of DALI's class."""

    def __init__(self, device_id: int | None) -> None:
        made = ctypes.c_void_p()
        check(LIBRARY.cudaStreamCreateWithPriority(ctypes.byref(made), 0, 0))
        self.handle, self.device_id = made.value, device_id


def _on_cpu(spec: Any) -> None:
    """Makes operators for the CPU, and remembers where their results were to be."""
    add_arg, add_input, add_output = spec.AddArg, spec.AddInput, spec.AddOutput

    def argument(self: Any, name: str, value: Any) -> Any:
        return add_arg(self, name, {"device": "cpu", "device_id": _CPU_ONLY}.get(name, value))

    def entrance(self: Any, name: str, device: str, *more: Any) -> Any:
        return add_input(self, name, "cpu", *more)

    def exit(self: Any, name: str, device: str) -> Any:
        _output_devices.setdefault(self, []).append(device)
        return add_output(self, name, "cpu")

    spec.AddArg, spec.AddInput, spec.AddOutput = argument, entrance, exit


def _brought(outputs: Sequence[Any], devices: Sequence[str]) -> tuple[Any, ...]:
    """Brings results to where they were to be; raises where FAKE_DALI_FAILS says so."""
    fails = os.environ.get("FAKE_DALI_FAILS")
    if fails and "gpu" in devices:
        if fails == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        raise RuntimeError(f"Critical error in pipeline:\n{_ERROR}")
    pairs = zip(outputs, devices, strict=True)
    return tuple(TensorListGPU(output) if device == "gpu" else output for output, device in pairs)


def _read(value: Any, stream: Any) -> Any:
    """Waits for the stream, and returns the input as an operator of the CPU takes it."""
    if isinstance(value, list):
        return [_read(one, stream) for one in value]
    if not isinstance(value, OnDevice):
        return value
    LIBRARY.cudaStreamSynchronize(getattr(stream, "handle", stream))
    return value.host


def _pipeline(base: Any) -> Any:
    class Pipeline(base):  # type: ignore[misc]
        def __init__(self, *args: Any) -> None:
            self._device_id = args[-1].device_id
            args[-1].device_id = None
            super().__init__(*args)

        def Build(self, outputs: Sequence[tuple[Any, ...]]) -> None:
            self._devices = [device for _, device, *_ in outputs]
            super().Build([(name, "cpu", *more) for name, _, *more in outputs])

        def device_id(self) -> int:
            if self._device_id is None:
                return 0 if "gpu" in self._devices else _CPU_ONLY
            return int(self._device_id)

        def ShareOutputs(self, stream: Any = None) -> tuple[Any, ...]:
            return _brought(super().ShareOutputs(), self._devices)

        def Outputs(self, stream: Any = None) -> tuple[Any, ...]:
            return _brought(super().Outputs(), self._devices)

        def SetExternalTensorInput(self, name: str, values: Any, stream: Any = None, *more: Any) -> None:
            super().SetExternalTensorInput(name, _read(values, stream))

        def SetExternalTLInput(self, name: str, values: Any, stream: Any = None, *more: Any) -> None:
            super().SetExternalTLInput(name, _read(values, stream))

    return Pipeline


def _operator(base: Any) -> Any:
    """Class of operators in dynamic mode."""

    class Operator(base):  # type: ignore[misc]
        def __init__(self, spec: Any) -> None:
            super().__init__(spec)
            self._devices = _output_devices[spec]

        def SetupAndRun(self, workspace: Any, batch_size: int | None = None) -> None:
            workspace.devices = self._devices
            super().SetupAndRun(workspace, batch_size)

    return Operator


def _workspace(base: Any) -> Any:
    class Workspace(base):  # type: ignore[misc]
        def __init__(self, thread_pool: Any = None, stream: Any = None) -> None:
            super().__init__(thread_pool)
            self._stream = stream

        def AddInput(self, value: Any) -> None:
            super().AddInput(_read(value, self._stream))

        def AddArgumentInput(self, name: str, value: Any) -> None:
            super().AddArgumentInput(name, _read(value, self._stream))

        def GetOutputs(self) -> tuple[Any, ...]:
            return _brought(super().GetOutputs(), self.devices)

    return Workspace


def _thread_pool(base: Any) -> Any:
    class ThreadPool(base):  # type: ignore[misc]
        def __init__(self, threads: int, device_id: int | None = None, **more: Any) -> None:
            super().__init__(threads, **more)

    return ThreadPool
