"""The GPU session runs here, at toy size, against the CPU stand-ins: its first run on a GPU is no first run."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import subprocess
import sys
import time
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import minato_gpu.device.accelerator
import minato_gpu.engine.builder
from benchmarks import gpu_session
from benchmarks.gpu_session import PARTS
from benchmarks.isolate import MeasurementError, isolated
from benchmarks.session import checks, gpu_tests, harm, questions
from benchmarks.session import settings as about
from benchmarks.session.record import NO_TIME
from benchmarks.session.settings import LEAST_S, Request, Settings
from minato_gpu import parity
from tests.support.fake_device import FakeDevice

ABOUT = {"benchmark": "gpu_session", "settings": {"commit": "abc", "quick": True}, "machine": {"gpus": ["H"]}}


def settings(tmp_path: Path) -> Settings:
    return Settings.usual("cpu", tmp_path, quick=True)


@pytest.mark.on_request  # twenty seconds, of what is benchmarks' own
@pytest.mark.timeout(240)
def test_every_part_at_toy_size(tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    command = [sys.executable, "-m", "benchmarks.gpu_session", "--device", "cpu", "--quick", "--out", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["settings"]["device"] == "cpu" and content["settings"]["commit"]
    assert str(tmp_path) not in path.read_text(encoding="utf-8")
    rows = {case: {row["name"]: row for row in content["rows"] if row["case"] == case} for case in PARTS}
    assert [row["passed"] for case in ("first", "parity") for row in rows[case].values()] == [True, True]
    assert [row["passed"] for row in rows["probe"].values()] == [True] * 5
    asked = {name: row for name, row in rows["checks"].items() if "missing" not in row}
    assert list(rows["checks"]) == [check.name for check in checks.CHECKS]
    assert list(asked) == [check.name for check in checks.CHECKS if check.anywhere]
    assert all(isinstance(row["holds"], bool) and row["means"] for row in asked.values())
    tuned = [name for name, row in rows["tune"].items() if "missing" not in row]
    assert tuned[0] == "hybrid" and {"dali", "pytorch", "spdl"} < {*tuned}
    assert {*rows["rates"]} == {*rows["training"]} == {"cpu", "device", *rows["tune"]}
    assert len(rows["light"]) == 3 and {"cpu", "hybrid"} < {*rows["light"]}
    assert len(rows["cores"]) == 8
    for case in ("rates", "training", "light", "cores"):
        measured = [row for row in rows[case].values() if "missing" not in row]
        assert all(row["samples_per_s"] > 0 and row["step_s"] > 0 for row in measured)
        assert all(row["cores_busy"] > 0 and row["cpu_s_per_sample"] > 0 for row in measured)
        assert all(row.get("content_ok", True) for row in measured)
        assert all(("resident_step_p99_s" in row) == (case in ("training", "light")) for row in measured)
    assert list(rows["memory"]) == ["hybrid", "hybrid, budget", "dali"]
    assert all(row["device_bytes_peak"] > 0 for row in rows["memory"].values())
    assert len(rows["price"]) == len(harm.EVERY) + 1 and rows["price"]["slope"]["step_s_per_device_s"] is not None
    assert rows["price"]["a batch for every 1 steps"]["device_busy"] > 0
    assert rows["thread"]["hybrid"]["next_p99_s"] >= rows["thread"]["hybrid"]["next_p50_s"] > 0
    unmeasured = {target["name"] for target in content["targets"] if target["measured"] is None}
    assert unmeasured <= {"step_slowdown"}  # where the CPU lane did not suffice


@pytest.mark.parametrize("commit", [None, "abc"])
def test_on_a_gpu_it_must_be_said_what_is_measured(monkeypatch: pytest.MonkeyPatch, commit: str | None) -> None:
    monkeypatch.setattr(gpu_session, "_begun", _never)
    monkeypatch.setattr(gpu_session, "isolated", lambda *_, **__: {})
    command = ["--device", "cuda", *(["--commit", commit] if commit else [])]
    done = CliRunner().invoke(gpu_session.main, command)
    assert ("--commit must be given" in done.output) is (commit is None)


@pytest.mark.parametrize("quick", [True, False])
def test_results_lie_outside_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: bool) -> None:
    on_gpu = replace(settings(tmp_path), device="cuda", quick=quick)
    monkeypatch.delenv("OUT", raising=False)
    assert not about.default_path(on_gpu, ABOUT).is_relative_to(about.ROOT)
    monkeypatch.setenv("OUT", str(tmp_path))
    assert about.default_path(on_gpu, ABOUT).is_relative_to(tmp_path)


@pytest.mark.parametrize(("holds", "means"), [(True, "good"), (False, "bad")])
def test_an_answer_comes_with_what_it_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holds: bool, means: str
) -> None:
    """And a question that cannot be asked hides no other."""
    asked = Request(replace(settings(tmp_path), device="cuda"), [], time.perf_counter() + 60)

    def answered(ask: Any, *rest: Any, **options: Any) -> Any:
        if ask is settings:
            raise MeasurementError("no driver")
        return holds, {"figure": 3}

    breaks: Any = settings
    questions_ = (("known", breaks, "", ""), ("breaks", breaks, "", ""), ("works", questions.new_enough, "good", "bad"))
    monkeypatch.setattr("benchmarks.session.settings.isolated", answered)
    monkeypatch.setattr(checks, "CHECKS", [checks.Check(*one) for one in questions_])
    known = [{"case": "checks", "name": "known", "holds": True}]
    broken, works = checks.checks(replace(asked, rows=known))
    assert broken == {"name": "breaks", "error": "no driver"}
    assert works == {"name": "works", "holds": holds, "means": means, "figure": 3}
    late = replace(asked, deadline=time.perf_counter())
    assert [row["missing"] for row in checks.checks(late)] == [NO_TIME] * 3


def test_the_driver_is_asked_for_a_context() -> None:
    class Driver:
        def __init__(self, status: int) -> None:
            self.status = status

        def cuInit(self, flags: int) -> int:
            return 0

        def cuDevicePrimaryCtxGetState(self, device: int, flags: Any, active: Any) -> int:
            active._obj.value = device
            return self.status

    assert [questions.has_context(Driver(0), number) for number in (0, 1)] == [False, True]
    with pytest.raises(RuntimeError, match="error 100"):
        questions.has_context(Driver(100))


@pytest.mark.parametrize("fails", [True, False])
def test_it_is_seen_whether_a_late_error_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    device = FakeDevice()
    monkeypatch.setattr(minato_gpu.device.accelerator, "available", lambda _: True)
    monkeypatch.setattr(minato_gpu.engine.builder, "Accelerator", lambda _: device)

    def later(holds: Any) -> None:
        if fails and not holds:
            device.fail(RuntimeError("device-side assert triggered"))

    monkeypatch.setattr(questions, "assert_later", later)
    holds, figures = questions.late_errors_are_told(settings(tmp_path))
    assert holds is fails and ("device-side assert" in figures["told"]) is fails
    assert (figures["threads_left"], figures["ended"]) == ([], "status 0") and "said" not in figures


class Aborts:
    """Ends its process where it is let go of, as memory of PyTorch's does after an error of CUDA's."""

    def __str__(self) -> str:
        return "device-side assert triggered"

    def __del__(self) -> None:
        faulthandler.disable()
        os.write(2, b"terminate called: device-side assert triggered\n")
        os.abort()


@pytest.mark.parametrize("when", ["before it is told", "after"])
def test_a_late_error_that_ends_the_process_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def load(*_: Any, **__: Any) -> Any:
        if when == "after":
            raise RuntimeError(Aborts())
        Aborts()

    monkeypatch.setattr(questions, "DataLoader", load)
    holds, figures = questions.late_errors_are_told(settings(tmp_path))
    assert not holds and figures["threads_left"] is None and figures["ended"] == "ended by SIGABRT"
    assert ("assert" in figures["told"]) is (when == "after") and figures["said"].startswith("terminate called")


def test_nothing_is_given_more_time_than_its_part_has(tmp_path: Path) -> None:
    """A part that is ended loses all that it has found."""
    asked = Request(settings(tmp_path), [], time.perf_counter() + 20)
    assert asked.limit_s(6.0) == 6.0 and 6.0 < asked.limit_s(63.0) <= 20.0
    late = Request(settings(tmp_path), [], time.perf_counter() - 20)
    assert late.limit_s(63.0) == LEAST_S


def test_tests_that_take_too_long_tell_what_they_have_found() -> None:
    says = "print('tests/a.py::one PASSED', flush=True); import time; time.sleep(600)"
    limit_s, told = 0.5, ""
    while "PASSED" not in told:  # on a busy machine it takes a while until Python has begun
        status, told = gpu_tests.run([sys.executable, "-c", says], limit_s)
        limit_s *= 2
    assert status is None
    assert gpu_tests.run([sys.executable, "-c", "import sys; print('no'); sys.exit(3)"], 60.0) == (3, "no\n")


def test_each_file_of_tests_is_a_row_and_a_crash_is_told_with_its_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpu_tests.FIRST in gpu_tests.files() and len(gpu_tests.files()) > 5
    answers = {"a.py": (0, "1 passed"), "b.py": (-11, "Fatal Python error\nFAILED b.py::one"), "c.py": (None, "")}
    monkeypatch.setattr(gpu_tests, "files", lambda: [*answers, "d.py"])
    monkeypatch.setattr(gpu_tests, "run", lambda command, limit_s: answers[command[-1]])
    known = [{"case": "first", "name": "d.py", "passed": True}]
    asked = Request(replace(settings(tmp_path), quick=False), known, time.perf_counter() + 60)
    rows = {row["name"]: row for row in gpu_tests.tests(asked)}
    assert {name: row["passed"] for name, row in rows.items()} == {"a.py": True, "b.py": False, "c.py": False}
    assert rows["b.py"]["failed"] == ["FAILED b.py::one"] and rows["b.py"]["error"].endswith("ended by SIGSEGV")
    assert rows["c.py"]["error"].endswith("not through in time")


def test_a_pipeline_that_cannot_be_checked_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where soundfile is not installed."""
    asked = Request(replace(settings(tmp_path), quick=False), [], time.perf_counter() + 60)
    report = parity.ParityReport([{"stage": "a", "passed": True}], [])

    def checked(function: Any, module: str, *rest: Any, **options: Any) -> Any:
        if "speech" in module:
            raise MeasurementError("no module named 'soundfile'")
        return report

    monkeypatch.setattr("benchmarks.session.settings.isolated", checked)
    rows = {row["name"]: row for row in gpu_session.check(asked)}
    assert list(rows) == list(gpu_session.MODULES)
    assert [name for name, row in rows.items() if not row["passed"]] == ["speech_recognition"]
    assert "soundfile" in rows["speech_recognition"]["error"]


def test_a_measurement_may_end_by_itself(fresh: Executor, tmp_path: Path) -> None:
    for grace_s, left in ((60.0, "unwound"), (0.0, "")):
        note = tmp_path / f"{grace_s}"
        assert fresh.submit(_ended, note, grace_s).result() == left


def _ended(note: Path, grace_s: float) -> str:
    def unwinds() -> None:
        import signal

        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
        note.write_text("", encoding="ascii")
        try:
            time.sleep(600)
        finally:
            note.write_text("unwound", encoding="ascii")

    gc.freeze()
    limit_s = 0.5
    while not note.exists():
        with pytest.raises(MeasurementError, match="no result"):
            isolated(unwinds, timeout_s=limit_s, settle_s=0.0, grace_s=grace_s)
        limit_s *= 2
    return note.read_text(encoding="ascii")


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("it was run")
