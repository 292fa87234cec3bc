"""``stats()``, ``scalars()`` and the timeline: counters where the table of cases (tests/contracts) does not look."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from typing import Any

import pytest

from minato_gpu import BadSample, DataLoader
from minato_gpu.lanes.base import Report
from minato_gpu.observe import telemetry as module
from minato_gpu.observe.telemetry import Telemetry
from tests.contracts.datasets import Made

BAD = 3, 9, 16


def _broken(index: int) -> int:
    if index in BAD:
        raise ValueError(f"sample {index} is broken")
    return index


def _nine(bad: BadSample) -> str:
    return "raise" if bad.index == 9 else "skip"


def _no_eight(samples: Sequence[int]) -> Sequence[int]:
    if 8 in samples:
        raise ValueError("eight")
    return samples


def _until_the_end(loader: Any) -> tuple[int, int]:
    """Samples that came, and errors."""
    batches, seen, errors = iter(loader), 0, 0
    while True:
        try:
            seen += len(next(batches))
        except ValueError:
            errors += 1
        except StopIteration:
            return seen, errors


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize(
    ("make", "more", "prepared"),
    [(_broken, {"on_error": "skip"}, 17), (_broken, {"on_error": _nine}, 17), (int, {"collate_fn": _no_eight}, 20)],
    ids=["left out", "one raised", "not joined"],
)
def test_a_lane_counts_what_it_has_prepared(make: Any, more: dict[str, Any], prepared: int, workers: int) -> None:
    loader: Any = DataLoader(Made(20, make), 4, num_workers=workers, **more)
    seen, _ = _until_the_end(loader)
    stats = loader.stats()
    assert stats["samples_delivered"] == seen == 20 - stats["samples_failed"] - stats["samples_skipped"]
    assert stats["lanes"]["cpu"]["samples"] == prepared


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


@pytest.mark.parametrize("workers", [0, 2])
def test_scalars_of_a_loader(workers: int) -> None:
    data: Any = range(12)
    loader: Any = DataLoader(data, 4, num_workers=workers)
    with pytest.raises(RuntimeError, match=r"nothing to tell before the first iter\(\)"):
        loader.scalars()
    assert len(list(loader)) == 3
    found = loader.scalars()
    assert found["samples_delivered"] == 12.0 and found["lanes/cpu/slots"] == max(workers, 1)
    assert all(type(value) is float and math.isfinite(value) for value in found.values())


# --- telemetry alone: times that no run has on purpose --------------------------------------------------------------


def report(done: int, begin: float, end: float) -> Report:
    return Report(1, 1, 0, 0, done, end - begin, begin, end, False)


def test_busy_is_what_was_done_while_the_epoch_ran() -> None:
    """Not what was prepared ahead before it began, nor for the next one after it ended."""
    log = Telemetry(10.0)
    log.lanes["cpu"].slots = 1
    log.end = 20.0
    for begin, end in ((1.0, 9.0), (9.0, 11.0), (11.0, 18.0), (18.0, 25.0), (25.0, 30.0)):
        log.kept_busy("cpu", report(1, begin, end))
    assert log.stats(99.0)["lanes"]["cpu"]["busy_share"] == 1.0


def test_memory_is_bounded_and_counters_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RING", 50)
    log = Telemetry(0.0)
    for number in range(200):
        log.worked("cpu", report(2, number, number + 1), 2, [(number, number + 2)], 0.0, prepared=True)
        log.delivered(number + 1, number, 2, 0.5, (0,))
    stats, timeline = log.stats(200.0), log.timeline()
    assert stats["samples_delivered"] == stats["lanes"]["cpu"]["samples"] == 400
    assert stats["wait_s"] == {"p50": 0.5, "p95": 0.5, "p99": 0.5, "total": 100.0}
    assert len(timeline["batches"]) <= 50 and len(timeline["spans"]) <= 50
    assert timeline["batches"][-1][2] == 199
