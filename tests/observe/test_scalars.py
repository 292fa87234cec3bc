"""Counters as flat scalars."""

from __future__ import annotations

import gc
import math
from typing import Any

import numpy as np
import pytest

from minato_gpu import DataLoader
from minato_gpu.observe.scalars import scalars


def test_every_finite_number_under_its_path() -> None:
    given: dict[str, Any] = {
        "samples": 3,
        "lanes": {"cpu": {"busy_share": 0.5, "spared": True, "queue_s": {"p50": np.float32(0.25)}}},
        "device": [{"copies": 1}, {"copies": 2}],
        "failures": [{"epoch": 0, "position": 17}],
        "first_batch_s": None,
        "policy": "lru",
        "prediction": {"log_sigma": math.nan, "rank_correlation": math.inf},
    }
    found = scalars(given)
    assert found == {
        "samples": 3.0,
        "lanes/cpu/busy_share": 0.5,
        "lanes/cpu/spared": 1.0,
        "lanes/cpu/queue_s/p50": 0.25,
        "device/0/copies": 1.0,
        "device/1/copies": 2.0,
    }
    assert {type(value) for value in found.values()} == {float}


@pytest.mark.parametrize("workers", [0, 2])
def test_of_a_loader(workers: int) -> None:
    data: Any = range(12)
    loader: Any = DataLoader(data, 4, num_workers=workers)
    with pytest.raises(RuntimeError, match=r"nothing to tell before the first iter\(\)"):
        loader.scalars()
    assert len(list(loader)) == 3
    found = loader.scalars()
    assert found["samples_delivered"] == 12.0 and found["lanes/cpu/slots"] == max(workers, 1)
    assert all(type(value) is float and math.isfinite(value) for value in found.values())


@pytest.mark.parametrize("persists", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_that_is_left_takes_no_more_time(workers: int, persists: bool) -> None:
    data: Any = range(12)
    loader: Any = DataLoader(data, 4, num_workers=workers, persistent_workers=persists and workers > 0)
    for _ in loader:
        assert loader.stats()["elapsed_s"] < loader.stats()["elapsed_s"]
        break
    left = loader.stats()
    assert left["elapsed_s"] == loader.stats()["elapsed_s"] and left["batches_delivered"] == 1
    assert len(list(loader)) == 3
    assert loader.stats()["elapsed_s"] == loader.stats()["elapsed_s"]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_that_has_ended_takes_no_more_time(workers: int) -> None:
    """Whenever its iterator goes."""
    data: Any = range(12)
    loader: Any = DataLoader(data, 4, num_workers=workers)
    iterator = iter(loader)
    assert len(list(iterator)) == 3
    ended = loader.stats()["elapsed_s"]
    del iterator
    gc.collect()
    assert loader.stats()["elapsed_s"] == ended
