"""CuPy by NumPy: in place of the module ``cupy``. Of what CuPy has of its own there is what the project uses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.lib.mixins import NDArrayOperatorsMixin
from torch.utils._pytree import tree_map

from tests.fake_cuda.runtime import LIBRARY, Memory, Seen, array


class ndarray(NDArrayOperatorsMixin):
    """An array on the device. ``host``: NumPy's array of the same memory."""

    def __init__(self, host: Any) -> None:
        self.host = host
        self.data = SimpleNamespace(ptr=host.ctypes.data)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.host.__array_interface__, "version": 2}

    def __dlpack__(self, *_: object, **__: object) -> Any:
        return torch.as_tensor(self, device="cuda").__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **more: Any) -> Any:
        made = getattr(ufunc, method)(*_given(args), **_given(more))
        return more["out"][0] if "out" in more else _taken(made)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.host, name)
        return _function(value) if callable(value) else value

    def __len__(self) -> int:
        return len(self.host)

    def __getitem__(self, key: Any) -> Any:
        found = self.host[_given(key)]
        return ndarray(found) if np.may_share_memory(found, self.host) else _taken(found)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.host[_given(key)] = _given(value)


def _given(values: Any) -> Any:
    """Waits for the current stream, and returns arrays of what is on the device."""

    def given(value: Any) -> Any:
        if isinstance(value, ndarray):
            return value.host
        if not hasattr(value, "__cuda_array_interface__"):
            return value
        LIBRARY.cudaStreamSynchronize(torch.cuda.current_stream().cuda_stream)
        return array(Seen(value))

    return tree_map(given, values)


def _taken(values: Any) -> Any:
    """Copies arrays that a function has made to the device."""

    def taken(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        copy = array(Memory(max(1, value.nbytes)))[: value.nbytes].view(value.dtype).reshape(value.shape)
        copy[...] = value
        return ndarray(copy)

    return tree_map(taken, values)


def _function(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **more: _taken(function(*_given(args), **_given(more)))


def _of(space: ModuleType) -> Callable[[str], Any]:
    """NumPy's names, whose functions take and give arrays of ours."""

    def found(name: str) -> Any:
        value = getattr(space, "asarray" if name == "from_dlpack" else name)
        if isinstance(value, ModuleType):
            inner = ModuleType(name)
            inner.__getattr__ = _of(value)  # type: ignore[method-assign]
            return inner
        if isinstance(value, type) or not callable(value):
            return value
        return _function(value)

    return found


cuda = SimpleNamespace(
    Device=lambda number: nullcontext(),
    Stream=SimpleNamespace(from_external=lambda stream: nullcontext()),
    get_current_stream=lambda: SimpleNamespace(ptr=torch.cuda.current_stream().cuda_stream),
)


class RawKernel:
    """The one kernel of ``tests/device/test_on_a_gpu.py``, which waits for the host's word."""

    def __init__(self, source: str, name: str) -> None:
        assert name == "wait", f"the kernel {name} cannot run without a GPU"

    def compile(self) -> None:
        """Nothing is to be done."""

    def __call__(self, grid: object, block: object, args: tuple[Any]) -> None:
        LIBRARY.fake_cuda_wait(torch.cuda.current_stream().cuda_stream, int(args[0]))


def get_default_memory_pool() -> Any:
    """A pool that is always empty."""
    return SimpleNamespace(free_all_blocks=lambda: None)


__getattr__ = _of(np)
