"""Values of a sample between the host, DALI, CuPy and torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from minato_gpu.lanes.base import Draws
from minato_gpu.samples import StageError, Value

Given = tuple[Mapping[str, Value], int | Draws]
"""Fields of a sample, and its seed; or, in its place, what was drawn with it, where the fields have been checked."""
Batch = Sequence[Mapping[str, Value]]  # fields of samples
Result = dict[str, Value] | StageError  # of a sample: what its stages have written
Drawn = Sequence[Draws]  # what was drawn for each


def to_numpy(value: Value) -> Value:
    """``value`` (NumPy, DALI, CuPy or torch) as a NumPy array; a view where it lies on the host already."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value
    for to_host in ("as_cpu", "cpu", "get"):  # DALI on a device, torch, CuPy
        if hasattr(value, to_host):
            return np.asarray(getattr(value, to_host)())
    return np.asarray(value)


def plain(value: Value, dtype: npt.DTypeLike | None = None) -> Value:
    """As a C-ordered NumPy array of this dtype."""
    return np.asarray(to_numpy(value), dtype, order="C")


def as_tensor(value: Value, device: str) -> Value:
    """As a torch tensor on ``device``."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        # A copy, because torch refuses read-only and mirrored arrays, and the function may work in place.
        return torch.tensor(plain(value), device=device)
    return torch.utils.dlpack.from_dlpack(value) if hasattr(value, "__dlpack__") else value


def device_number(device: str) -> int | None:
    """The number of a CUDA device, or None for "cpu". ValueError for anything else."""
    kind, _, number = device.partition(":")
    if kind == "cpu" and not number:
        return None
    if kind == "cuda" and (number.isdecimal() or not number):
        return int(number or 0)
    raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {device!r}")
