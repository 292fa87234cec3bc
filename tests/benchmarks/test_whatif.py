"""What the benchmark asks about, and how it sums up."""

from __future__ import annotations

import pytest

from benchmarks.whatif import summary
from benchmarks.whatif_run import Way, budget
from benchmarks.whatif_settings import POLICIES, QUESTIONS, Around, points
from minato_gpu.sources.blocks import space_of

AROUND = Around(16, 0.005, 1e5, Way(2, slept=(0.005,) * 32), quick=False)


def test_settings_are_asked_as_they_are_run() -> None:
    asked = {question: list(points(question, AROUND)) for question in QUESTIONS}
    for point in [point for some in asked.values() for point in some]:
        way, setting = point.way, point.setting
        assert setting.workers in (None, way.workers) and setting.policy == way.policy
        assert setting.cache == way.cache and setting.bytes_per_s in (None, way.rate)
        assert setting.step_s in (None, way.step_s) and setting.latency_s in (None, way.latency_ms / 1e3)
    shares = {(point.setting.policy, point.setting.cache) for point in asked["cache"]}
    assert shares == {("", None)} | {(policy, share) for policy in POLICIES for share in (0.25, 0.5, 0.75, 1.0)}
    assert [point.setting.workers for point in asked["workers"]] == [1, 2, 4, 8, 16]
    assert {point.way.latency_ms for point in asked["latency"]} == {0, 5, 20, 50, 100}
    steps = [point.way.step_s / (16 * 0.005 / 2) for point in asked["step"]]
    assert min(steps) == pytest.approx(0.25) and max(steps) == pytest.approx(2.0)


def test_workers_that_compute_are_no_more_than_cores() -> None:
    computed = AROUND._replace(base=Way(2))
    assert [point.setting.workers for point in points("workers", computed)] == [1, 2]


def test_a_budget_counts_whole_blocks() -> None:
    assert budget([1000, 3000], 1, 0.5) == round(0.5 * (space_of(1000) + space_of(3000)))
    assert budget([1000], 2, 1.0) == 2 * space_of(500)


def test_the_summary_leaves_out_what_failed() -> None:
    row = {"question": "step", "measured_s": 1.0}
    rows = [{**row, "error": error, "within": within} for error, within in ((0.02, True), (-0.08, False), (0.03, True))]
    found = list(summary([*rows, {"question": "step", "failed": "died"}]))
    assert [each["question"] for each in found] == ["step", "all"]
    assert found[0]["points"] == 3 and found[0]["median_error"] == 0.03
    assert found[0]["within_share"] == pytest.approx(2 / 3)
