"""The GPU session runs here, at toy size, against the CPU stand-ins: its first run on a GPU is no first run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

from benchmarks import gpu_session
from benchmarks.gpu_session import PARTS, Record
from benchmarks.isolate import MeasurementError
from benchmarks.session import gpu_tests, loaders, parts
from benchmarks.session.measure import Run
from benchmarks.session.settings import NO_TIME, Request, Row, Settings

ABOUT = {"benchmark": "gpu_session", "settings": {"commit": "abc"}, "machine": {"gpus": ["H"]}, "rows": []}


def settings(tmp_path: Path) -> Settings:
    return Settings.usual("cpu", tmp_path, quick=True)


def request_of(chosen: Settings, seconds: float = 600.0, rows: Any = ()) -> Request:
    return Request(chosen, list(rows), time.perf_counter() + seconds)


@pytest.mark.on_request  # twenty seconds, of what is benchmarks' own
@pytest.mark.timeout(240)
def test_every_part_at_toy_size(tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    command = [sys.executable, "-m", "benchmarks.gpu_session", "--device", "cpu", "--quick", "--out", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["settings"]["device"] == "cpu" and content["settings"]["commit"]
    assert content["complete"] == sorted(PARTS) and str(tmp_path) not in path.read_text(encoding="utf-8")
    rows = {case: {row["name"]: row for row in content["rows"] if row["case"] == case} for case in PARTS}
    assert [row["passed"] for case in ("tests", "parity") for row in rows[case].values()] == [True, True]
    assert [row["passed"] for row in rows["probe"].values()] == [True] * 5
    assert (
        {"cpu", "device", "hybrid", "dali", "dali_dynamic", "pytorch", "spdl"} < {*rows["rates"]} == {*rows["training"]}
    )
    for case in ("rates", "training"):
        measured = [row for row in rows[case].values() if "missing" not in row]
        assert all(row["samples_per_s"] > 0 and row["step_s"] > 0 and row["cores_busy"] > 0 for row in measured)
        assert all(row.get("content_ok", True) for row in measured)
        assert all(("resident_step_p99_s" in row) == (case == "training") for row in measured)
    assert list(rows["memory"]) == ["hybrid", "hybrid, budget", "dali"]
    assert all(row["device_bytes_peak"] > 0 for row in rows["memory"].values())


# --- the GPU tests and parity ------------------------------------------------------------------------------------


def test_tests_that_take_too_long_tell_what_they_have_found() -> None:
    says = "print('tests/a.py::one PASSED', flush=True); import time; time.sleep(600)"
    limit_s, said = 0.5, ""
    while "PASSED" not in said:  # on a busy machine it takes a while until Python has begun
        ended, said = gpu_tests.run([sys.executable, "-c", says], limit_s)
        limit_s *= 2
    assert ended == "not through in time"
    assert gpu_tests.run([sys.executable, "-c", "import sys; print('no'); sys.exit(3)"], 60.0) == ("status 3", "no\n")
    assert gpu_tests.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], 60.0)[0] == "ended by SIGKILL"


def test_each_file_of_tests_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_tests.files()[0] == gpu_tests.FIRST and len(gpu_tests.files()) > 5
    answers = {"a.py": ("status 0", "1 passed"), "b.py": ("ended by SIGSEGV", "Fatal Python error"), "c.py": ("x", "")}
    monkeypatch.setattr(gpu_tests, "files", lambda: ["a.py", "b.py", "c.py", "d.py"])
    monkeypatch.setattr(gpu_tests, "run", lambda command, limit_s: answers[command[-1]])
    known = [{"case": "tests", "name": "d.py", "passed": True}]
    asked = request_of(replace(settings(tmp_path), quick=False), rows=known)
    rows = {row["name"]: row for row in gpu_tests.tests(asked)}
    assert {name: row["passed"] for name, row in rows.items()} == {"a.py": True, "b.py": False, "c.py": False}
    assert rows["b.py"]["error"].endswith("ended by SIGSEGV")


# --- loaders that take turns -------------------------------------------------------------------------------------


def test_no_run_begins_without_time_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one as long as the longest so far; and one that has failed is not run again."""
    asked, runs = request_of(settings(tmp_path)), list[str]()

    def run(_: Any, settings: Settings, contender: Any, *__: Any, **___: Any) -> Run:
        if contender.name == "device":
            raise MeasurementError("one\ntwo")
        runs.append(contender.name)
        if len(runs) == 3:
            object.__setattr__(asked, "deadline", time.perf_counter())
        return Run(100, 100 / 7.0, 1.0, [0.25], [0.5])

    monkeypatch.setattr("benchmarks.session.settings.isolated", run)
    rows = [*parts.turns(asked, [loaders.ours(1)] * 5, "empty")]
    assert runs == ["cpu", "hybrid", "cpu"]
    assert [(row["name"], row.get("repetitions"), row.get("error")) for row in rows] == [
        *(("cpu", 1, None), ("device", None, "one\ntwo"), ("hybrid", 1, None), ("cpu", 2, None))
    ]
    late = parts.turns(request_of(settings(tmp_path), 0.0), [loaders.ours(1)], "empty")
    assert [row["missing"] for row in late] == [NO_TIME] * 3


# --- what is known is written at once, and a later command goes on with it; time is shared out ------------------------


def test_a_row_is_written_when_it_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "session.json"
    seen: list[list[Row]] = []

    def rates(asked: Request) -> Iterator[Row]:
        yield {"name": "hybrid", "samples_per_s": 1.0}
        seen.append(json.loads(path.read_text(encoding="utf-8"))["rows"])
        yield {"name": "hybrid", "samples_per_s": 2.0}
        yield {"name": "dali", "missing": NO_TIME}

    def parity(asked: Request) -> Iterator[Row]:
        seen.append([dict(row) for row in asked.rows])
        yield {"name": "p", "passed": True}
        raise MeasurementError("one\nand two")

    def memory(asked: Request) -> Iterator[Row]:
        yield {"name": "dali", "missing": "not installed"}

    for part in (rates, parity, memory):
        monkeypatch.setitem(PARTS, part.__name__, (part, 60.0))
    record = Record(path, ABOUT)
    gpu_session.session(settings(tmp_path), ["rates", "parity", "memory"], record, time.perf_counter() + 60)
    assert seen[0] == [{"case": "rates", "name": "hybrid", "samples_per_s": 1.0}]
    assert [(row["name"], row.get("samples_per_s")) for row in seen[1]] == [("hybrid", 2.0), ("dali", None)]
    content = json.loads(path.read_text(encoding="utf-8"))
    told = {(row["case"], row["name"]): row for row in content["rows"]}
    assert [*told][:4] == [("rates", "hybrid"), ("rates", "dali"), ("parity", "p"), ("parity", "parity")]
    assert told["parity", "parity"]["error"].endswith("one\nand two\n")
    assert content["complete"] == ["memory"], "there was no time for one, and an error of the other"


def test_a_later_command_goes_on_with_what_an_earlier_one_knew(tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    Record(path, ABOUT).add({"case": "rates", "name": "dali", "samples_per_s": 9.0})
    again = Record(path, ABOUT)
    assert [row["name"] for row in again.rows] == ["dali"]
    for name, other in (("commit", {"settings": {"commit": "def"}}), ("gpus", {"machine": {"gpus": ["B"]}})):
        with pytest.raises(click.UsageError, match=f"measured otherwise: {name} differ; name another --out"):
            Record(path, {**ABOUT, **other})


def test_a_row_without_figures_takes_no_place_of_one_with(tmp_path: Path) -> None:
    """A later command with less time knows less, not better; but a test that passed once may fail."""
    record = Record(tmp_path / "session.json", ABOUT)
    known = {"case": "rates", "name": "dali", "samples_per_s": 9.0}
    passed = {"case": "tests", "name": "a.py", "passed": True}
    for row in (known, passed, {"case": "rates", "name": "dali", "missing": NO_TIME}, {**passed, "error": "one"}):
        record.add(row)
    assert record.rows == [{**passed, "error": "one"}, known]
    record.add({**known, "samples_per_s": 8.0, "error": "in the last run"})
    assert record.rows[1]["samples_per_s"] == 8.0
