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


def test_cache_chaos(tmp_path: Path) -> None:
    said = programs.run("benchmarks.cache_chaos", "--seeds", "1", "--folder", str(tmp_path), "--json", "-")
    document = json.loads(said)
    assert document["settings"]["runs_broken"] == 0
    assert document["settings"]["samples"] == document["rows"][0]["samples"] > 0
