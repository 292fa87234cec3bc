"""Deaths, and samples that cannot be sent, where a device lane goes on with what CPU workers have read."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu import DataLoader, Field, Pipeline, Stage
from minato_gpu.pipeline import TorchFunction
from tests.contracts.datasets import Made

_FORK = multiprocessing.get_context("fork")
_X = Field(np.float32, (4, 2500))


def _read(fields: Any, _: Any) -> Any:
    return {"x": np.full((4, 2500), fields["n"], np.float32), "label": fields["n"]}


_READ = Stage("read", ("n",), {"x": _X, "label": Field(np.int64)}, cpu=_read)


def _loader(*stages: Stage, outputs: tuple[str, ...] = ("x", "label"), length: int = 64, **more: Any) -> Any:
    pipeline = Pipeline((_READ, *stages), outputs=outputs, name="tests")
    arguments: dict[str, Any] = {"num_workers": 2, "lanes": ("cpu", "device"), **more}
    return DataLoader(Made(length, lambda n: {"n": n}), 8, pipeline=pipeline, **arguments)


def _stack(samples: list[Any]) -> torch.Tensor:
    return torch.stack([torch.as_tensor(sample["x"]) for sample in samples])


def _odd(device: Callable[[Any, Any], Any]) -> Stage:
    """A stage whose samples cannot be pickled where the CPU makes them."""

    def cpu(fields: Any, _: Any) -> Any:
        return {"x": fields["x"] + np.float32(1), "odd": lambda: 1}

    return Stage("odd", ("x",), {"x": _X, "odd": Field(object)}, cpu=cpu, device=TorchFunction(device))


def _refuse(fields: Any, _: Any) -> Any:
    raise ValueError("not on this device")


@pytest.mark.parametrize("lanes", [("cpu", "device"), ("device",)], ids="+".join)
def test_samples_of_the_device_lane_that_cannot_be_sent(lanes: tuple[str, ...]) -> None:
    """The job that is to join them prepares them itself."""
    loader = _loader(_odd(_refuse), outputs=("x", "label", "odd"), lanes=lanes, collate_fn=_stack, timeout=20)
    values = [float(x[0, 0]) for batch in loader for x in batch]
    assert values == [n + 1.0 for n in range(64)]
    if lanes == ("device",):
        assert loader.stats()["samples_repeated"] >= 64


def test_what_was_read_for_samples_that_cannot_be_sent_is_let_go() -> None:
    """An epoch's samples, as they were read and as they were joined, are 5 MiB; what is let go of is written again."""

    def on_device(fields: Any, _: Any) -> Any:
        return {"x": fields["x"] + 1, "odd": torch.ones(1)}

    more: dict[str, Any] = {"outputs": ("x", "label", "odd"), "collate_fn": _stack, "persistent_workers": True}
    loader = _loader(_odd(on_device), **more)
    kept = []
    for _ in range(8):
        assert sum(len(batch) for batch in loader) == 64
        engine = loader._session.engine
        kept.append(sum(os.fstat(arena.fd).st_blocks for arena in engine._links.arenas) // 2)
    assert engine.assembly.samples.unshippable
    assert kept[-1] <= 7_680, f"KiB in the workers' arenas, by epoch: {kept}"


def test_a_collate_function_that_works_in_place_does_not_see_what_the_dead_left() -> None:
    left = _FORK.Value("i", 1, lock=False)

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        keys = [int(sample[0]) for sample in samples]
        for sample in samples:
            sample += 1
        if 6 in keys and left.value:
            left.value -= 1
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.stack(samples)

    dataset = Made(16, lambda key: torch.full((20_000,), key))
    more: dict[str, Any] = {"num_workers": 2, "collate_fn": collate, "in_order": False, "on_worker_death": "replace"}
    loader = DataLoader(dataset, 4, **more)
    assert sorted(int(sample[0]) for batch in loader for sample in batch) == list(range(1, 17))
    assert left.value == 0 and loader.stats()["samples_repeated"] >= 4
