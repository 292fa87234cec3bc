"""Copies of states: apart from the original, the same to the eye."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu.snapshots import Snapshot


def test_what_changes_later_is_not_in_it() -> None:
    shared = [1, 2]
    value: dict[str, Any] = {"a": shared, "b": shared, "t": torch.arange(6).reshape(2, 3).T, "n": np.arange(3)}
    snapshot = Snapshot(value)
    shared.append(3)
    value["t"][:] = 0
    value["n"][:] = 0
    for _ in range(2):
        copy = snapshot.copy()
        assert copy["a"] == [1, 2] and copy["a"] is copy["b"]
        assert copy["t"].tolist() == [[0, 3], [1, 4], [2, 5]] and copy["n"].tolist() == [0, 1, 2]
        copy["a"].clear()
        copy["t"][:] = 7


@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.ones(2, dtype=dtype) for dtype in (torch.uint8, torch.bfloat16, torch.complex64, torch.bool)),
        *(torch.tensor(2.5), torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(1)), torch.zeros(0, 3)),
        torch.Generator().get_state(),
    ],
    ids=lambda tensor: f"{type(tensor).__name__}, {tensor.dtype}, {tuple(tensor.shape)}, {tensor.requires_grad}",
)
def test_tensors(tensor: torch.Tensor) -> None:
    copy = Snapshot([tensor]).copy()[0]
    assert type(copy) is type(tensor) and copy.dtype == tensor.dtype and torch.equal(copy, tensor)
    assert (copy.requires_grad == tensor.requires_grad and copy.data_ptr() != tensor.data_ptr()) or not tensor.numel()


def test_what_cannot_be_pickled() -> None:
    class Local:
        def __init__(self) -> None:
            self.at = [1]

    value = Local()
    snapshot = Snapshot({"own": value})
    value.at.append(2)
    copy: Any = snapshot.copy()
    assert copy["own"].at == [1] and copy["own"] is not snapshot.copy()["own"]


def test_what_cannot_be_copied_at_all() -> None:
    with pytest.raises(TypeError):
        Snapshot({"lock": threading.Lock()})
