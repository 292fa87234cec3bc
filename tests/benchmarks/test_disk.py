"""What copies on disk cost, at toy size, and the command of their chaos."""

from __future__ import annotations

import json
from pathlib import Path

from tests import programs


def test_disk_tier() -> None:
    rows = json.loads(programs.run("benchmarks.disk_tier", "--quick", "--json", "-"))["rows"]
    hits = [row for row in rows if row["what"] == "hit"]
    assert [row["cache"] for row in hits] == ["warm", "cold"]
    for row in hits:
        assert row["bare_us"] > 0 and row["hit_us"] > 0 and 0 < row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
    assert {"keep a copy", "give a copy up", "checksum: crc32"} <= {row["what"] for row in rows}


def test_disk_chaos(tmp_path: Path) -> None:
    said = programs.run("benchmarks.disk_chaos", "--seeds", "2", "--folder", str(tmp_path), "--json", "-")
    document = json.loads(said)
    assert document["settings"]["runs_broken"] == 0 and [row["seed"] for row in document["rows"]] == [0, 1]


def test_cold_files() -> None:
    """Each loader checks what it delivered; the first batch needs no disk of its own."""
    said = programs.run(
        "benchmarks.cold_files",
        "--quick",
        "--case",
        "bytes",
        "--loader",
        "gpu bounded",
        "--loader",
        "plain sub",
        "--json",
        "-",
    )
    rows = {row["loader"]: row for row in json.loads(said)["rows"]}
    assert "minato_gpu bounded" in rows
    for row in rows.values():
        assert row["samples_per_s"] > 0 and row["cpu_us"] > 0 and row["first_batch_s"] > 0
    if len(rows) == 2:
        ours = rows["minato_gpu bounded"]
        assert ours["best_peer"] == "spdl plain subprocesses" and ours["ratio_to_best"] > 0 and ours["cpu_ratio"] > 0
