"""Types and conversions of a sample's values between the host, DALI, CuPy and torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from minato_gpu.lanes.base import Draws
from minato_gpu.samples import StageError, Value

ExecutorInput = tuple[Mapping[str, Value], int | Draws]
"""A sample's fields with its seed, or with what was drawn from it if the fields have been checked."""
Batch = Sequence[Mapping[str, Value]]  # the fields of each sample
Result = dict[str, Value] | StageError  # the fields that a sample's stages wrote, or its error
Drawn = Sequence[Draws]  # the drawn parameters of each sample


def to_numpy(value: Value) -> Value:
    """Returns a value of DALI, CuPy or torch as a NumPy array, a view where it is on the host; NumPy's unchanged."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value
    for to_host in ("as_cpu", "cpu", "get"):  # DALI on a device, torch, CuPy
        if hasattr(value, to_host):
            return np.asarray(getattr(value, to_host)())
    return np.asarray(value)


def plain(value: Value, dtype: npt.DTypeLike | None = None) -> Value:
    """Returns the value as a C-ordered NumPy array of this dtype; None: of its own."""
    return np.asarray(to_numpy(value), dtype, order="C")


def as_tensor(value: Value, device: str) -> Value:
    """Returns a NumPy value as a torch tensor on ``device``, in memory of its own; a CuPy or DALI array as a tensor
    that shares its memory; a tensor, or a value that is no array, as it is."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        # A copy, because torch refuses read-only and mirrored arrays, and the function may work in place.
        return torch.tensor(plain(value), device=device)
    return torch.utils.dlpack.from_dlpack(value) if hasattr(value, "__dlpack__") else value
