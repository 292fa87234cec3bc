"""The CUDA runtime of this process, and its device memory, which is the host's, as Python sees it."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

LIBRARY = ctypes.CDLL("libcudart.so.13")
for _name, _types in {
    "cudaMalloc": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t),
    "cudaMemcpyAsync": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p),
    "cudaStreamCreateWithPriority": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint, ctypes.c_int),
    "cudaStreamSynchronize": (ctypes.c_void_p,),
    "fake_cuda_release": (ctypes.c_void_p,),
    "fake_cuda_sleep": (ctypes.c_void_p, ctypes.c_long),
    "fake_cuda_wait": (ctypes.c_void_p, ctypes.c_void_p),
}.items():
    getattr(LIBRARY, _name).argtypes = _types


def check(status: int) -> None:
    """Raises for an error of the runtime."""
    if status:
        raise RuntimeError(f"CUDA error {status} of tests/fake_cuda")


class Memory:
    """Device memory, given back as from a pool: when every stream has come by."""

    def __init__(self, nbytes: int) -> None:
        pointer = ctypes.c_void_p()
        check(LIBRARY.cudaMalloc(ctypes.byref(pointer), nbytes))
        self.address = pointer.value
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (self.address, False)}

    def __del__(self) -> None:
        LIBRARY.fake_cuda_release(self.address)


class Seen:
    """Somebody's object on the device as an array on the host."""

    def __init__(self, owner: Any) -> None:
        names = ("shape", "typestr", "data", "strides")
        self.__array_interface__ = {"version": 3, **{n: owner.__cuda_array_interface__.get(n) for n in names}}
        self.owner = owner


def array(owner: object) -> npt.NDArray[Any]:
    """The array that keeps ``owner`` (Memory or Seen)."""
    return np.asarray(owner)
