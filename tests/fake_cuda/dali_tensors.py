"""DALI's tensors on a GPU: each is one of its CPU tensors, whose memory is the device's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.fake_cuda.runtime import LIBRARY, Memory, Seen, array, check

_TO_DEVICE = 3


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
