"""From the GPU session's rows: the price of device work, and which targets are met."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.session.harm import priced_rows
from benchmarks.session.targets import targets


def test_the_price_is_the_slope() -> None:
    points = [
        {"every": every, "device_busy": share, "device_s_per_step": work_s, "step_s": 0.1 + 0.5 * work_s}
        for every, share, work_s in ((0.0, 0.0, 0.0), (2.0, 0.2, 0.02), (1.0, 0.4, 0.05), (0.0, 0.0, 0.0))
    ]
    rows = priced_rows(points)
    assert [row["name"] for row in rows[:2]] == ["no device work", "a batch for every 2 steps"]
    assert [row["repetitions"] for row in rows[:3]] == [2, 1, 1]
    assert [row["step_slowdown"] for row in rows[:3]] == pytest.approx([0.0, 0.1, 0.25])
    assert rows[-1]["step_s_per_device_s"] == pytest.approx(0.5)


def loader_row(case: str, name: str, *rates: float, **more: Any) -> dict[str, Any]:
    rate = float(np.median(rates))
    return {"case": case, "name": name, "batch": 100, "samples_per_s": rate, "samples_per_s_each": list(rates), **more}


def found(rows: list[dict[str, Any]], name: str, case: str) -> dict[str, Any]:
    (row,) = (row for row in targets(rows) if row["name"] == name and row["case"].startswith(case))
    return row


def test_nothing_measured_is_nothing_met() -> None:
    rows = targets([])
    assert len(rows) == 11
    assert all(row["measured"] is None and row["met"] is None and row["why"] == "not measured" for row in rows)


@pytest.mark.parametrize(("hybrid", "met"), [((28.0, 27.5), True), ((26.0, 26.5), False)])
def test_hybrid_of_sum(hybrid: tuple[float, float], met: bool) -> None:
    """Of 15 and 20 samples/s; the device lane takes two of the six cores that the CPU lane needs for its own."""
    rows = [
        loader_row("rates", "cpu", 15, 15, cores_busy_each=[6.0, 6.0]),
        loader_row("rates", "device", 20, 20, 20, cores_busy_each=[2.0, 2.0, 2.0]),
    ]
    row = found([*rows, loader_row("rates", "hybrid", *hybrid)], "hybrid_of_sum", "rates")
    assert row["met"] is met and row["low"] < row["measured"] < row["high"]
    assert row["measured"] == pytest.approx(np.sqrt(hybrid[0] * hybrid[1]) / 30)


def test_without_a_step_the_best_peer_must_be_beaten_by_half() -> None:
    rows = [loader_row("rates", "hybrid", 30.0), loader_row("rates", "spdl", 10.0)]
    assert found(rows, "ratio_to_best_peer", "rates")["met"] is True
    rows += [loader_row("rates", "dali", 25.0), {"case": "rates", "name": "pytorch", "missing": "not here"}]
    row = found(rows, "ratio_to_best_peer", "rates")
    assert (row["best_peer"], row["met"], row["target"], row["peers_absent"]) == ("dali", False, 1.5, ["pytorch"])
    assert row["measured"] == pytest.approx(1.2) and row["bottleneck"] == "preparation"


@pytest.mark.parametrize(("resident_step_s", "target"), [(100 / 14.0, 1.0), (100 / 16.0, 1.5)])
def test_training_must_be_faster_where_it_can_be(resident_step_s: float, target: float) -> None:
    rows = [loader_row("training", "hybrid", 12.0, resident_step_s=resident_step_s), loader_row("training", "dali", 10)]
    row = found(rows, "ratio_to_best_peer", "training")
    assert row["target"] == target and row["met"] is (target == 1.0)


@pytest.mark.parametrize(
    ("cpu_rate", "slowdown", "met"), [(9.9, 0.02, True), (9.9, 0.03, False), (9.0, 0.02, None), (9.0, 0.5, None)]
)
def test_the_step_counts_where_the_cpu_lane_suffices(cpu_rate: float, slowdown: float, met: bool | None) -> None:
    rows = [
        loader_row("light", "cpu", cpu_rate, resident_step_s=10.0, step_slowdown=0.01),
        loader_row("light", "hybrid", 9.9, resident_step_s=10.0, step_slowdown=slowdown),
    ]
    row = found(rows, "step_slowdown", "light")
    assert row["met"] is met and ("did not suffice" in row.get("why", "")) == (met is None)


def test_limits_of_memory_and_of_the_training_thread() -> None:
    times = {"next_p99_s": 2e-4, "next_p999_s": 1.1e-3, "pause_p99_s": 3e-4, "pause_p999_s": 1e-4}
    rows: list[dict[str, Any]] = [
        {"case": "memory", "name": "hybrid", "device_bytes_peak": 1_000_000_000},
        {"case": "memory", "name": "hybrid, budget", "device_bytes_peak": 999_999_999},
        {"case": "thread", "name": "hybrid", **times},
    ]
    met = {(row["name"], row["case"]): row["met"] for row in targets(rows) if row["measured"] is not None}
    assert met == {
        ("device_bytes_peak", "memory, hybrid"): False,
        ("device_bytes_peak", "memory, hybrid, budget"): True,
        ("next_p99_s", "thread"): True,
        ("next_p999_s", "thread"): False,
        ("pause_p99_s", "thread"): False,
        ("pause_p999_s", "thread"): True,
    }
