"""Structural equality of batches: types, dtypes, layouts and values."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def same(left: Any, right: Any) -> bool:
    """Whether two batches are the same all the way down; tensors by dtype, layout, shape and values (NaN equals NaN,
    and the sign of a zero does not count)."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return _same_tensor(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, Mapping):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple, deque)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right) or (left != left and right != right)


def _same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    if (left.dtype, left.layout, left.shape) != (right.dtype, right.layout, right.shape):
        return False
    if left.requires_grad != right.requires_grad:
        return False
    return np.array_equal(_dense(left), _dense(right), equal_nan=left.dtype.is_floating_point)


def _dense(tensor: torch.Tensor) -> Any:
    dense = tensor.detach()
    dense = dense.to_dense() if dense.layout != torch.strided else dense
    dense = dense.float() if dense.dtype == torch.bfloat16 else dense
    return dense.resolve_conj().resolve_neg().numpy()
