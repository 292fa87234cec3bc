"""Telemetry: counters, percentiles, and a timeline in bounded memory."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from minato_gpu.lanes.base import Report
from minato_gpu.observe import telemetry as module
from minato_gpu.observe.telemetry import Telemetry, percentiles


def report(first: int, done: int, begin: float, end: float, seconds: float, worker: int = 0) -> Report:
    return Report(1, 1, worker, first, done, seconds, begin, end, False)


def test_stats_are_plain_data_even_before_anything_happened() -> None:
    stats = Telemetry(5.0).stats(7.5)
    assert json.loads(json.dumps(stats)) == stats
    assert stats["samples_expected"] is None and stats["first_batch_s"] is None
    assert stats["elapsed_s"] == 2.5 and stats["wait_s"] == {"p50": 0, "p95": 0, "p99": 0, "total": 0}


def test_lanes_samples_and_times() -> None:
    """Host reads keep a slot busy and count no sample; a later report of a chunk begins where the last one ended."""
    log = Telemetry(10.0)
    log.lanes["cpu"].slots = 2
    first, later, read = (
        report(0, 4, 11.0, 13.0, 2.0),
        report(4, 6, 11.0, 14.0, 1.0),
        report(0, 5, 11.0, 12.0, 1.0, worker=1),
    )
    log.worked("cpu", first, [(0, 4)], 10.5, prepared=True)
    log.worked("cpu", later, [(4, 6)], 10.5, prepared=True)
    log.worked("cpu", read, [(6, 11)], 10.0, prepared=False)
    for one in (first, later, read):
        log.kept_busy("cpu", one)
    log.end = 15.0
    lane = log.stats(99.0)["lanes"]["cpu"]
    assert lane["samples"] == 6 and lane["slots"] == 2
    assert lane["busy_share"] == pytest.approx(4.0 / (5.0 * 2))
    assert lane["service_s"]["p50"] == pytest.approx(0.5) and lane["queue_s"]["p50"] == pytest.approx(0.5)
    spans = log.timeline()["spans"]
    assert [span[:7] for span in spans] == [
        (1.0, 3.0, "cpu", 0, 0, 0, 4),
        (3.0, 4.0, "cpu", 0, 0, 4, 2),
        (1.0, 2.0, "cpu", 1, 0, 6, 5),
    ]


def test_busy_is_what_was_done_while_the_epoch_ran() -> None:
    """Not what was prepared ahead before it began, nor for the next one after it ended."""
    log = Telemetry(10.0)
    log.lanes["cpu"].slots = 1
    log.end = 20.0
    for begin, end in ((1.0, 9.0), (9.0, 11.0), (11.0, 18.0), (18.0, 25.0), (25.0, 30.0)):
        log.kept_busy("cpu", report(0, 1, begin, end, end - begin))
    assert log.stats(99.0)["lanes"]["cpu"]["busy_share"] == 1.0


def test_deliveries_waits_and_stalls() -> None:
    log = Telemetry(1.0)
    for number, (now, wait) in enumerate([(3.0, 2.0), (4.0, 0.0), (5.0, 1.0)]):
        log.delivered(now, number, 4, wait, (number, 0))
    log.stalled("first batch", 1.0, 3.0)
    log.stalled("slow sample", 3.0, 4.0)
    log.stalled("slow sample", 4.0, 4.5)
    stats = log.stats(6.0)
    assert (stats["samples_delivered"], stats["batches_delivered"], stats["first_batch_s"]) == (12, 3, 2.0)
    assert stats["wait_s"]["total"] == 3.0 and stats["wait_s"]["p50"] == 1.0 and stats["lateness"]["max"] == 2
    assert stats["stalls"] == {
        "first batch": {"count": 1, "seconds": 2.0},
        "slow sample": {"count": 2, "seconds": 1.5},
    }
    assert log.timeline()["batches"] == [(2.0, 0, 0, 4, 2.0), (3.0, 0, 1, 4, 0.0), (4.0, 0, 2, 4, 1.0)]


def test_slow_samples_are_marked_by_time_per_sample() -> None:
    log = Telemetry(0.0)
    for position in range(10):
        log.worked("cpu", report(0, 10, 0.0, 1.0, 1.0), [(10 * position, 10 * position + 10)], 0.0, prepared=True)
    log.worked("device", report(0, 1, 1.0, 2.0, 1.0), [(100, 101)], 0.0, prepared=True)
    assert [span[-1] for span in log.timeline()["spans"]] == [False] * 10 + [True]


def test_memory_is_bounded_and_counters_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RING", 50)
    log = Telemetry(0.0)
    for number in range(200):
        log.worked("cpu", report(0, 2, number, number + 1, 1.0), [(number, number + 2)], 0.0, prepared=True)
        log.delivered(number + 1, number, 2, 0.5, (0,))
    stats, timeline = log.stats(200.0), log.timeline()
    assert stats["samples_delivered"] == stats["lanes"]["cpu"]["samples"] == 400
    assert stats["wait_s"]["total"] == 100.0
    assert len(timeline["batches"]) <= 50 and len(timeline["spans"]) <= 50
    assert timeline["batches"][-1][2] == 199


def test_work_on_the_consumers_own_thread() -> None:
    log = Telemetry(0.0)
    log.lanes["cpu"].slots = 1
    log.inline(1.0, 2.0, 0, 3)
    log.inline(2.0, 4.0, 1, 2)
    stats = log.stats(4.0)
    assert (stats["samples_delivered"], stats["lanes"]["cpu"]["samples"], stats["wait_s"]["total"]) == (5, 5, 3.0)
    assert stats["lanes"]["cpu"]["busy_share"] == 0.75
    assert [span[5:7] for span in log.timeline()["spans"]] == [(0, 3), (3, 2)]


@pytest.mark.parametrize("values", [[3.0], range(101), np.linspace(0, 1, 7).tolist()])
def test_percentiles(values: Any) -> None:
    found = percentiles(values)
    assert found == {f"p{p}": pytest.approx(float(np.percentile(list(values), p))) for p in (50, 95, 99)}
    assert all(type(value) is float for value in found.values())
