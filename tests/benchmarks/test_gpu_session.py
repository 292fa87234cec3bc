"""The GPU session runs here, at toy size, against the CPU stand-ins: its first run on a GPU is no first run."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import minato_gpu.engine.building
import minato_gpu.memory.accelerator
from benchmarks import gpu_session
from benchmarks.gpu_session import PARTS, Part
from benchmarks.isolate import MeasurementError, isolated
from benchmarks.session import about, checks, harm, loaders, parts, questions
from benchmarks.session.dali import DaliGpu
from benchmarks.session.measure import Run
from benchmarks.session.parts import Asked, Rows
from benchmarks.session.settings import Settings
from benchmarks.turns import in_turns
from minato_gpu import parity
from tests.fake_device import FakeDevice

ABOUT = {"benchmark": "gpu_session", "settings": {"commit": "abc", "quick": True}, "machine": {"gpus": ["H"]}}
PEERS = ["dali", "dali_dynamic", "torchvision", "dali_cpu", "pytorch", "spdl"]


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
    assert [row["passed"] for case in ("tests", "parity") for row in rows[case].values()] == [True, True]
    asked = {name: row for name, row in rows["checks"].items() if "missing" not in row}
    assert list(rows["checks"]) == [check.name for check in checks.CHECKS]
    assert list(asked) == [check.name for check in checks.CHECKS if check.anywhere]
    assert all(isinstance(row["holds"], bool) and row["means"] for row in asked.values())
    assert list(rows["tune"]) == PEERS
    missing = [name for name, row in rows["tune"].items() if "missing" in row]
    assert set(missing) <= {"torchvision"}  # which no torch for CPUs alone goes with
    assert sum(row.get("chosen", False) for row in content["rows"]) == len(PEERS) - len(missing)
    assert list(rows["rates"]) == list(rows["training"]) == ["cpu", "device", "hybrid", *PEERS]
    assert list(rows["light"]) == ["cpu", "hybrid", "dali"]
    for case in ("rates", "training", "light"):
        found = [row for name, row in rows[case].items() if name not in missing]
        assert all(row["samples_per_s"] > 0 and row["step_s"] > 0 for row in found)
        assert all(("resident_step_s" in row) == (case != "rates") for row in found)
    assert list(rows["memory"]) == ["hybrid", "hybrid, budget", "dali"]
    assert all(row["device_bytes_peak"] > 0 for row in rows["memory"].values())
    assert len(rows["price"]) == len(harm.EVERY) + 1 and rows["price"]["slope"]["step_s_per_device_s"] is not None
    assert rows["price"]["a batch for every 1 steps"]["device_share"] > 0
    assert rows["thread"]["hybrid"]["next_p99_s"] >= rows["thread"]["hybrid"]["next_p50_s"] > 0
    unmeasured = {target["name"] for target in content["targets"] if target["measured"] is None}
    assert unmeasured <= {"step_slowdown"}  # where the CPU lane did not suffice


def test_parts_join_what_the_document_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, list[Rows]] = {
        "tests": [[{"name": "t", "passed": False, "error": "no"}], [{"name": "t", "passed": True}]],
        "parity": [[{"name": "p", "passed": True}]],
    }
    seen: list[Rows] = []

    def part(name: str, settings: Settings, rows: Rows) -> Rows:
        seen.append(list(rows))
        return answers[name].pop(0)

    monkeypatch.setattr(gpu_session, "_part", part)
    path = tmp_path / "session.json"
    gpu_session.session(settings(tmp_path), ["parity"], path, ABOUT)
    gpu_session.session(settings(tmp_path), ["tests"], path, ABOUT)
    content = gpu_session.session(settings(tmp_path), ["tests"], path, ABOUT)
    assert [(row["case"], row["passed"]) for row in content["rows"]] == [("tests", True), ("parity", True)]
    assert [[row["case"] for row in rows] for rows in seen] == [[], ["parity"], ["parity"]]
    assert json.loads(path.read_text(encoding="utf-8"))["rows"] == content["rows"]


def test_figures_of_another_commit_are_neither_joined_nor_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_session, "_part", lambda name, settings, rows: [{"name": name, "passed": True}])
    path = tmp_path / "2026-11-22.json"
    assert about.place(path, ABOUT) == path
    gpu_session.session(settings(tmp_path), ["parity"], path, ABOUT)
    assert about.place(path, ABOUT) == path
    other = {**ABOUT, "settings": {"commit": "def", "quick": True}}
    assert about.place(path, other) == tmp_path / "2026-11-22-2.json"
    content = gpu_session.session(settings(tmp_path), ["tests"], path, other)
    assert [row["case"] for row in content["rows"]] == ["tests"]


def test_what_only_a_gpu_decides_is_decided_in_ten_minutes_and_every_part_fits_a_command() -> None:
    names = list(PARTS)
    assert names[:4] == ["checks", "tests", "parity", "tune"]
    assert sum(PARTS[name].limit_s for name in names[:3]) <= 600.0 - 60.0
    assert max(part.limit_s for part in PARTS.values()) + gpu_session.PHOTOGRAPHS_S + 60.0 <= gpu_session.COMMAND_S


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
    asked = Asked(replace(settings(tmp_path), device="cuda"), [], time.perf_counter() + 60)

    def answered(ask: Any, *rest: Any, **options: Any) -> Any:
        if ask is settings:
            raise MeasurementError("no driver")
        return holds, {"figure": 3}

    monkeypatch.setattr(checks, "isolated", answered)
    monkeypatch.setattr(
        checks,
        "CHECKS",
        [checks.Check("breaks", settings, "", ""), checks.Check("works", questions.new_enough, "good", "bad")],  # type: ignore[arg-type]
    )
    broken, works = checks.checks(asked)
    assert broken == {"name": "breaks", "error": "no driver"}
    assert works == {"name": "works", "holds": holds, "means": means, "figure": 3}


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
    monkeypatch.setattr(minato_gpu.memory.accelerator, "available", lambda _: True)
    monkeypatch.setattr(minato_gpu.engine.building, "Accelerator", lambda _: device)

    def later(holds: Any) -> None:
        if fails and not holds:
            device.fail(RuntimeError("device-side assert triggered"))

    monkeypatch.setattr(questions, "assert_later", later)
    holds, figures = questions.late_errors_are_told(settings(tmp_path))
    assert holds is fails and ("device-side assert" in figures["told"]) is fails and figures["threads_left"] == []


def test_a_machine_without_git_is_no_error() -> None:
    assert about._said("no-such-command-anywhere") is None
    assert about._said(sys.executable, "-c", "print('one'); print('two')") == "one"


def _too_long(folder: Path) -> tuple[Rows, bool]:
    """A part with a measurement of its own that never ends: its row, and whether the measurement has ended too."""
    note = folder / "pid"

    def for_ever() -> Rows:
        note.write_text(str(os.getpid()), encoding="ascii")
        time.sleep(600)
        return []

    gc.freeze()  # a fork looks for garbage before it begins
    limit_s = 0.5
    while not note.exists():  # on a busy machine it takes a while until the measurement has begun
        PARTS["thread"] = Part(lambda asked: isolated(for_ever, settle_s=0.0), limit_s)
        rows = gpu_session._part("thread", Settings.usual("cpu", folder, quick=True), [])
        limit_s *= 2
    return rows, not Path(f"/proc/{note.read_text(encoding='ascii')}").exists()


def test_a_part_that_takes_too_long_is_ended_with_all_it_runs(fresh: Executor, tmp_path: Path) -> None:
    (row,), ended = fresh.submit(_too_long, tmp_path).result()
    assert row["passed"] is False and "no result after" in row["error"]
    assert ended


def test_nothing_is_given_more_time_than_its_part_has(tmp_path: Path) -> None:
    """A part that is ended loses all that it has found."""
    asked = Asked(settings(tmp_path), [], time.perf_counter() + 20)
    assert asked.limit_s(6.0) == 6.0 and 6.0 < asked.limit_s(63.0) <= 20.0
    late = Asked(settings(tmp_path), [], time.perf_counter() - 20)
    assert late.limit_s(63.0) == parts._LEAST_S


def test_tests_that_take_too_long_tell_what_they_have_found() -> None:
    says = "print('tests/a.py::one PASSED', flush=True); import time; time.sleep(600)"
    limit_s, said = 0.5, ""
    while "PASSED" not in said:  # on a busy machine it takes a while until Python has begun
        status, said = gpu_session._run([sys.executable, "-c", says], limit_s)
        limit_s *= 2
    assert status < 0
    assert gpu_session._run([sys.executable, "-c", "import sys; print('no'); sys.exit(3)"], 60.0) == (3, "no\n")


def test_a_pipeline_that_cannot_be_checked_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where soundfile is not installed."""
    asked = Asked(replace(settings(tmp_path), quick=False), [], time.perf_counter() + 60)
    report = parity.ParityReport([{"stage": "a", "passed": True}], [])

    def checked(function: Any, module: str, *rest: Any, **options: Any) -> Any:
        if "speech" in module:
            raise MeasurementError("no module named 'soundfile'")
        return report

    monkeypatch.setattr(gpu_session, "isolated", checked)
    rows = {row["name"]: row for row in gpu_session.check(asked)}
    assert list(rows) == list(gpu_session.MODULES)
    assert [name for name, row in rows.items() if not row["passed"]] == ["speech_recognition"]
    assert "soundfile" in rows["speech_recognition"]["error"]


def test_a_peer_that_is_not_installed_says_so(tmp_path: Path) -> None:
    asked = Asked(settings(tmp_path), [], time.perf_counter() + 60)
    absent = replace(DaliGpu("dali", 1), package="nvidia.no_such_package")
    (row,) = parts._rows(asked, [absent], "mixed", "empty", _never, 1)
    assert row["name"] == "dali" and row["missing"] == "nvidia.no_such_package is not installed"
    assert "error" not in row


def _never(contender: loaders.Contender) -> Any:
    raise AssertionError(f"{contender} was run")


def test_peers_come_with_the_settings_that_were_found(tmp_path: Path) -> None:
    rows: Rows = [
        {"case": "tune", "name": "dali", "chosen": False, "loader_settings": {"prefetch": 9}},
        {"case": "tune", "name": "dali", "chosen": True, "loader_settings": {"prefetch": 3, "threads": 7}},
        {"case": "tune", "name": "spdl", "missing": "spdl.pipeline is not installed"},
    ]
    dali, *others = parts.chosen_peers(Asked(settings(tmp_path), rows, 0.0))
    first, *rest = loaders.peers(settings(tmp_path)).values()
    assert dali.settings() == {**first.settings(), "threads": 7, "prefetch": 3}
    assert others == rest


@pytest.mark.parametrize("quick", [True, False])
def test_all_that_is_tried_can_be_tried(quick: bool, tmp_path: Path) -> None:
    peers = loaders.peers(settings(tmp_path))
    for name, changes in loaders.changes(quick=quick).items():
        for change in changes:
            assert parts._changed(peers[name], {**peers[name].settings(), **change}) != peers[name]


def test_tuning_keeps_what_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds: list[Callable[[Any], float]] = [
        lambda one: 2.0 if one.threads == 8 else 1.0,
        lambda one: 4.0 if one.prefetch == 3 and one.threads == 8 else 0.0,
    ]

    def run(asked: Asked, contender: Any, *rest: Any) -> Any:
        if contender.hw_decoder_load == 0.0:
            raise MeasurementError("no such engine")
        return Run(sum(speed(contender) for speed in speeds), 1.0, None, 0.0, 0.0, 3)

    tried = ({"threads": 8}, {"hw_decoder_load": 0.0}, {"prefetch": 3}, {"exec_dynamic": False})
    monkeypatch.setattr(loaders, "peers", lambda settings: {"dali": DaliGpu("dali", 16)})
    monkeypatch.setattr(loaders, "changes", lambda quick: {"dali": tried})
    monkeypatch.setattr(loaders, "available", lambda contender: True)
    monkeypatch.setattr(parts, "_run", run)
    rows = parts.tune(Asked(settings(tmp_path), [], time.perf_counter() + 60))
    assert [row.get("samples_per_s") for row in rows] == [1.0, 2.0, None, 6.0, 6.0]
    assert [row["chosen"] for row in rows] == [False, False, False, True, False]
    assert rows[2]["error"] == "no such engine"


def test_no_repetition_begins_without_time_for_it(tmp_path: Path) -> None:
    contender = loaders.ours(1)[0]
    left = iter([True, False])
    runs, errors = in_turns("here", [contender], 5, lambda one: one.name, str, lambda: next(left))
    assert runs == {"cpu": ["cpu", "cpu"]} and not errors


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
