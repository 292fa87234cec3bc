"""Equality of samples and batches to the bit."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def same(left: Any, right: Any) -> bool:
    """Whether two samples or batches are the same all the way down: types, dtypes, layouts, flags and bytes (NaN equals
    the same NaN)."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return _same_tensor(left, right)
    if isinstance(left, Mapping):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple, deque)):
        return len(left) == len(right) and all(map(same, left, right))
    if not isinstance(left, (np.ndarray, np.generic)):
        return repr(left) == repr(right) or (not isinstance(left, float) and bool(left == right))
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return same(left.tolist(), right.tolist()) if left.dtype.hasobject else left.tobytes() == right.tobytes()


def _same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    facts = ("dtype", "layout", "device", "requires_grad", "is_quantized", "shape")
    if any(getattr(left, fact) != getattr(right, fact) for fact in facts):
        return False
    if left.layout is torch.strided and not left.is_quantized:
        return _bits(left) == _bits(right)
    dense = [(each.dequantize() if each.is_quantized else each.to_dense()).detach() for each in (left, right)]
    return torch.equal(*dense)


def _bits(tensor: torch.Tensor) -> bytes:
    """The elements in order, as bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    plain = plain.as_strided((plain.numel(),), (1,))  # one element counts as contiguous whatever its stride
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
