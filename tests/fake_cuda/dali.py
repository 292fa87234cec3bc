"""DALI's GPU graphs, computed by its CPU operators.

DALI's Python keeps what it knows of devices, with its own checks; only its compiled part is told "cpu" everywhere, and
its GPU tensors are replaced: each is one of its CPU tensors, whose memory is the device's. Where FAKE_DALI_FAILS is
set, every run that has results on the GPU fails, as nvImageCodec does on some GPUs; where that is ``crash``, the
process ends by SIGSEGV.
"""

from __future__ import annotations

import ctypes
import os
import signal
import weakref
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from tests.fake_cuda.runtime import LIBRARY, Memory, Seen, array, check

_ERROR = "Error in MIXED operator `nvidia.dali.fn.decoders.image_slice`: nvImageCodec failure: '#8'"
_CPU_ONLY = -99999
_TO_DEVICE = 3

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


class OnDevice:
    """What tensors and lists of them have; all else is asked of ``host``, DALI's tensor."""

    backend: Any  # DALI's, as it was

    def __init__(self, source: Any, layout: str | None = None, *_: object, **__: object) -> None:
        self.host = self._made_of(source)
        if layout:
            self.host.set_layout(layout)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "host":
            raise AttributeError(name)
        return getattr(self.host, name)

    @classmethod
    def _made_of(cls, source: Any) -> Any:
        raise NotImplementedError

    def _parts(self) -> Sequence[Any]:
        """DALI's tensors, one behind the other."""
        raise NotImplementedError

    def device_id(self) -> int:
        return 0

    def copy_to_external(self, ptr: Any, cuda_stream: Any = None, non_blocking: bool = False, **_: object) -> None:
        """Copies all samples to this address, one behind the other."""
        to = getattr(ptr, "value", ptr)
        for part in map(np.asarray, self._parts()):
            check(LIBRARY.cudaMemcpyAsync(to, part.ctypes.data, part.nbytes, _TO_DEVICE, cuda_stream))
            to += part.nbytes
        if not non_blocking:
            LIBRARY.cudaStreamSynchronize(cuda_stream)


class TensorGPU(OnDevice):
    """Made of a DLPack capsule, of what has CUDA's array interface, or of a sample of a list."""

    @classmethod
    def _made_of(cls, source: Any) -> Any:
        if isinstance(source, (OnDevice, cls.backend.TensorCPU)):
            return getattr(source, "host", source)
        if not hasattr(source, "__cuda_array_interface__"):
            import torch.utils.dlpack

            source = torch.utils.dlpack.from_dlpack(source)
        return cls.backend.TensorCPU(array(Seen(source)))

    def _parts(self) -> Sequence[Any]:
        return [self.host]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**np.asarray(self.host).__array_interface__, "version": 2}

    def __dlpack__(self, *_: object, **__: object) -> Any:
        import torch

        return torch.as_tensor(self, device="cuda").__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def as_cpu(self) -> Any:
        """Copies to the host, after waiting for the device."""
        LIBRARY.cudaDeviceSynchronize()
        return self.backend.TensorCPU(np.array(self.host), self.host.layout())


class TensorListGPU(OnDevice):
    """Made of tensors on the device, or by copying a list of the CPU there."""

    @classmethod
    def _made_of(cls, source: Any) -> Any:
        dense, of = cls.backend.TensorCPU, cls.backend.TensorListCPU
        if isinstance(source, of):
            return cls._copied(source)
        if isinstance(source, (list, tuple)):
            return of([TensorGPU(one).host for one in source], layout=None, contiguous=False)
        if isinstance(source, TensorListGPU):
            return source.host
        host = TensorGPU(source).host
        return of(np.asarray(host) if isinstance(host, dense) else host)

    @classmethod
    def _copied(cls, source: Any) -> Any:
        """Copies to one block of the device's memory, sample behind sample."""
        dense, of = source.is_dense_tensor(), cls.backend.TensorListCPU
        samples = [np.asarray(one) for one in ([source.as_tensor()] if dense else source)]
        block, at, made = array(Memory(max(1, sum(one.nbytes for one in samples)))), 0, []
        for one in samples:
            made.append(block[at : at + one.nbytes].view(one.dtype).reshape(one.shape))
            made[-1][...] = one
            at += one.nbytes
        layout = source.layout()
        if dense:
            return of(made[0], layout)
        return of([cls.backend.TensorCPU(one, layout) for one in made], layout, contiguous=False)

    @staticmethod
    def from_dlpack_list(objects: Sequence[Any], layout: Any = None, stream: Any = None, **_: object) -> TensorListGPU:
        """A list of tensors, for which the stream waits."""
        return TensorListGPU([TensorGPU(one.__dlpack__(stream=stream.handle)) for one in objects], layout)

    @staticmethod
    def broadcast(sample: TensorGPU, count: int) -> TensorListGPU:
        """A list of one tensor, ``count`` times."""
        return TensorListGPU([sample] * count)

    def _parts(self) -> Sequence[Any]:
        return [self.host.as_tensor()] if self.host.is_dense_tensor() else list(self.host)

    def __len__(self) -> int:
        return len(self.host)

    def __getitem__(self, number: int) -> TensorGPU:
        return TensorGPU(self.host[number])

    def as_tensor(self) -> TensorGPU:
        """All samples as one tensor."""
        return TensorGPU(self.host.as_tensor())

    def as_cpu(self) -> Any:
        """Copies to the host, after waiting for the device."""
        LIBRARY.cudaDeviceSynchronize()
        samples = [self.backend.TensorCPU(np.array(one), self.host.layout()) for one in self.host]
        return self.backend.TensorListCPU(samples, self.host.layout())
