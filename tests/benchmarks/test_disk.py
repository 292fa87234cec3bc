"""What copies on disk cost, at toy size."""

from __future__ import annotations

import json

import pytest

from benchmarks.cold_files import Run, against_best
from tests import programs


def test_disk_tier() -> None:
    rows = json.loads(programs.run("benchmarks.disk_tier", "--quick", "--json", "-"))["rows"]
    hits = [row for row in rows if row["what"] == "hit"]
    assert [row["cache"] for row in hits] == ["warm", "cold"]
    for row in hits:
        assert row["bare_us"] > 0 and row["hit_us"] > 0 and 0 < row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
    assert {"keep a copy", "give a copy up", "checksum: crc32"} <= {row["what"] for row in rows}


def test_cold_files() -> None:
    arguments = "--quick", "--case", "bytes", "--loader", "gpu bounded", "--json", "-"
    (row,) = json.loads(programs.run("benchmarks.cold_files", *arguments))["rows"]
    assert row["loader"] == "minato_gpu bounded" and row["case"] == "cold files, bytes" and "error" not in row
    assert row["samples_per_s"] > 0 and row["cpu_us"] > 0 and row["first_batch_s"] > 0


def test_cold_files_are_compared_with_the_fastest_peer() -> None:
    runs = {
        "spdl": [Run(100.0, 10.0, 0.1), Run(110.0, 10.0, 0.1)],
        "pytorch": [Run(200.0, 40.0, 0.1), Run(220.0, 40.0, 0.1)],
        "minato_gpu": [Run(300.0, 60.0, 0.1), Run(330.0, 60.0, 0.1)],
    }
    row = against_best("minato_gpu", runs)
    assert row["best_peer"] == "pytorch" and row["ratio_to_best"] == pytest.approx(1.5)
    assert row["cpu_ratio"] == row["cpu_ratio_low"] == row["cpu_ratio_high"] == pytest.approx(1.5)
    assert against_best("pytorch", runs) == {}


def test_hits() -> None:
    rows = json.loads(programs.run("benchmarks.hits", "--quick", "--json", "-"))["rows"]
    assert [(row["tier"], row["cache"]) for row in rows] == [("memory", None), ("disk", "warm"), ("disk", "cold")]
    assert all(row["hit_us"] > 0 and row["bare_us"] > 0 and row["ratio"] > 0 for row in rows)
    assert all(row["turn_us"] > row["hit_us"] for row in rows[1:])
