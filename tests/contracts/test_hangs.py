"""Workers that hang are reported with their stack and stage, and replaced where they can be."""

from __future__ import annotations

import logging
import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu import DataLoader, Field, Pipeline, Stage
from minato_gpu.watchdog import WorkerHung
from tests.contracts.datasets import Made
from tests.raising import error_of

_FORK = multiprocessing.get_context("fork")


class _Gate:
    """Key 5 waits for a gate that nobody opens, the first ``times`` times."""

    def __init__(self, times: int) -> None:
        self.event = _FORK.Event()
        self.left = _FORK.Value("i", times, lock=False)

    def stuck_in_here(self, key: int) -> Any:
        if key == 5 and self.left.value:
            self.left.value -= 1
            self.event.wait()
        return torch.tensor(key)


def _loader(gate: _Gate, **more: Any) -> Any:
    arguments: dict[str, Any] = {"on_worker_death": "replace", "hang_timeout": 0.4, "num_workers": 2, **more}
    return DataLoader(Made(16, gate.stuck_in_here), 2, **arguments)


@pytest.mark.parametrize("order", [{}, {"in_order": False}], ids=["in order", "bounded"])
def test_a_hung_worker_is_replaced(order: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    loader = _loader(_Gate(1), **order)
    with caplog.at_level(logging.WARNING, "minato_gpu"):
        assert sorted(key for batch in loader for key in batch.tolist()) == list(range(16))
    assert loader.stats()["workers"] == {"died": 0, "hung": 1, "replaced": 1}
    [record] = caplog.records
    text = record.getMessage()
    assert "has hung: it has been at one sample (epoch 0, position 5, index 5, lane cpu)" in text
    assert "stuck_in_here" in text and "test_hangs.py" in text and "It is being replaced." in text


def test_a_sample_that_hangs_again_is_a_bad_sample() -> None:
    loader = _loader(_Gate(9), on_error="skip")
    assert [key for batch in loader for key in batch.tolist()] == [key for key in range(16) if key != 5]
    assert loader.stats()["workers"]["hung"] == 2
    assert loader.stats()["failures"][0]["index"] == "5"


def test_it_raises_with_the_stack() -> None:
    text = str(error_of(RuntimeError, list, _loader(_Gate(9))))
    assert "has hung" in text and "stuck_in_here" in text and "index 5" in text


@pytest.mark.parametrize("arguments", [{"on_worker_death": "raise"}, {"worker_kind": "thread"}], ids=str)
def test_what_is_not_replaced_is_an_error(arguments: dict[str, Any]) -> None:
    gate = _Gate(9)
    iterator = iter(_loader(gate, **arguments))
    text = str(error_of(WorkerHung, lambda: list(iterator)))
    gate.event.set()
    assert "has hung" in text and "stuck_in_here" in text and "It was not replaced" in text


def test_the_stage_is_named(caplog: pytest.LogCaptureFixture) -> None:
    gate = _Gate(1)

    def wait(fields: Any, _: Any) -> Any:
        return {"y": np.float32(gate.stuck_in_here(fields["x"]).item())}

    stage = Stage("waits", reads=("x",), writes={"y": Field(np.float32, ())}, cpu=wait)
    pipeline = Pipeline((stage,), outputs=("y",))
    dataset = Made(12, lambda key: {"x": key})
    loader = DataLoader(dataset, 4, num_workers=2, pipeline=pipeline, on_worker_death="replace", hang_timeout=0.4)
    assert [y for batch in loader for y in batch["y"].tolist()] == list(range(12))
    assert "stage 'waits'" in caplog.text


def test_slow_is_not_hung() -> None:
    """A limit that no sample reaches changes nothing, however long the epoch takes."""
    loader = DataLoader(Made(64, torch.tensor), 2, num_workers=2, on_worker_death="replace", hang_timeout=5.0)
    assert [key for batch in loader for key in batch.tolist()] == list(range(64))
    assert loader.stats()["workers"] == {"died": 0, "hung": 0, "replaced": 0}
