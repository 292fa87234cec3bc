"""A small pipeline over numbers with a device stage of each kind, and data sets to go with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from minato_gpu import Pipeline, Stage
from minato_gpu.pipeline.pipeline import CupyFunction, Field, TorchFunction

LENGTH, BATCH = 150, 8
X = Field(np.float32, (4, 40))


def read(fields: Any, params: Any) -> Any:
    return {"x": np.full((4, 40), fields["n"], np.float32), "label": fields["n"], "name": f"n{fields['n']}"}


def draw(rng: np.random.Generator, meta: Any) -> Any:
    return {"shift": float(rng.uniform(0, 1))}


def shift(fields: Any, params: Any) -> Any:
    return {"x": (fields["x"] + np.float32(params["shift"])).astype(np.float32)}


def shift_on_device(fields: Any, params: Any) -> Any:
    return {"x": fields["x"] + torch.tensor(params["shift"], dtype=torch.float32)}


def double(fields: Any, params: Any) -> Any:
    return {"x": fields["x"] * np.float32(2)}


def double_on_device(xp: Any, fields: Any, params: Any) -> Any:
    return {"x": fields["x"] * xp.float32(2)}


def shift_slowly(fields: Any, params: Any) -> Any:
    time.sleep(2e-3)
    return shift(fields, params)


def _pipeline(first: Callable[[Any, Any], Any]) -> Pipeline:
    return Pipeline(
        (
            Stage("read", ("n",), {"x": X, "label": Field(np.int64), "name": Field(object)}, cpu=read),
            Stage("shift", ("x",), {"x": X}, cpu=first, draw=draw, device=TorchFunction(shift_on_device)),
            Stage("double", ("x",), {"x": X}, cpu=double, device=CupyFunction(double_on_device)),
        ),
        outputs=("x", "label", "name"),
        name="tests",
    )


PIPELINE = _pipeline(shift)
COSTLY = _pipeline(shift_slowly)  # the CPU lane cannot keep up, so a device that is open has work


class Numbers(Dataset[Any]):
    """Sample ``n`` is {"n": n}."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, n: int) -> Any:
        return {"n": n}


class Plain(Dataset[Any]):
    """A plain data set: (array, number)."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, n: int) -> Any:
        return np.full((4, 40), n, np.float32), n


class Stream(IterableDataset[Any]):
    """The numbers in order."""

    def __iter__(self) -> Any:
        return iter(range(LENGTH))


def pad(samples: list[Any]) -> Any:
    """A collate function of the user's own; batches have many shapes."""
    return {"x": torch.stack([torch.as_tensor(sample["x"])[: 1 + len(samples) % 3] for sample in samples]), "n": 3}
