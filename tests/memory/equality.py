"""Equality of nested samples to the bit, types included (NaN equals the same NaN)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def same(got: Any, expected: Any) -> None:
    """Raise AssertionError where the two differ in structure, types, dtypes, shapes or bytes."""
    assert type(got) is type(expected), f"{type(got)} where {type(expected)} belongs"
    if isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            same(got[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            same(one, other)
    elif isinstance(expected, torch.Tensor):
        same_tensor(got, expected)
    elif isinstance(expected, (np.ndarray, np.generic)):
        assert got.dtype == expected.dtype and got.shape == expected.shape
        same(got.tolist(), expected.tolist()) if got.dtype.hasobject else same(got.tobytes(), expected.tobytes())
    else:
        assert repr(got) == repr(expected)


def same_tensor(got: torch.Tensor, expected: torch.Tensor) -> None:
    """The same for tensors: layout, flags and elements."""
    for fact in ("dtype", "layout", "device", "requires_grad", "is_quantized"):
        assert getattr(got, fact) == getattr(expected, fact), fact
    assert got.shape == expected.shape
    if expected.layout is torch.strided and not expected.is_quantized:
        assert bits(got) == bits(expected)
    else:
        dense = [(t.dequantize() if t.is_quantized else t.to_dense()).detach() for t in (got, expected)]
        assert torch.equal(*dense)


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in order, as bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    plain = plain.as_strided((plain.numel(),), (1,))  # one element counts as contiguous whatever its stride
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
