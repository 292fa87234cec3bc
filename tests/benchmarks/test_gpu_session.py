"""The GPU session runs here, at toy size, against the CPU stand-ins: its first run on a GPU is no first run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import gpu_session
from benchmarks.gpu_session import PARTS, Settings, main


def run(path: Path, *parts: str) -> tuple[int, list[dict[str, Any]]]:
    only = [word for part in parts for word in ("--only", part)]
    done = CliRunner().invoke(main, ["--device", "cpu", "--quick", "--out", str(path), *only])
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["settings"]["device"] == "cpu" and content["settings"]["commit"]
    return done.exit_code, content["rows"]


@pytest.mark.timeout(240)
def test_every_part_at_toy_size(tmp_path: Path) -> None:
    code, rows = run(tmp_path / "session.json", *PARTS)
    assert code == 0, rows
    by_case = {case: [row for row in rows if row["case"] == case] for case in PARTS}
    assert all(by_case.values())
    assert [row["passed"] for case in ("tests", "parity") for row in by_case[case]] == [True, True]
    assert [row["name"] for row in by_case["rates"]] == ["cpu", "device", "cpu+device"]
    assert all(row["samples_per_s"] > 0 for row in by_case["rates"])
    assert by_case["rates"][-1]["hybrid_of_sum"] > 0
    assert by_case["thread"][1]["next_p99_s"] >= by_case["thread"][1]["next_p50_s"] > 0


def test_a_part_that_fails_is_a_row_and_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"tests": [{"name": "tests", "passed": False, "error": "no"}], "parity": [{"name": "p", "passed": True}]}
    monkeypatch.setattr(gpu_session, "_part", lambda name, settings: answers[name])
    code, rows = run(tmp_path / "session.json", "tests", "parity")
    assert code == 1
    assert [(row["case"], row["passed"]) for row in rows] == [("tests", False), ("parity", True)]


def test_a_part_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARTS, "thread", (gpu_session.thread, 0.01))
    (row,) = gpu_session._part("thread", Settings.usual("cpu", quick=True))
    assert row["passed"] is False and "longer than" in row["error"]
