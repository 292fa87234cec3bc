"""What a GPU session takes for a figure, and what it refuses: the CPU standing in for the device, without a word."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from benchmarks.isolate import MeasurementError
from benchmarks.session import probe
from benchmarks.session.measure import Run, SubstituteError, refuse_substitutes, summary
from benchmarks.session.probe import Way
from benchmarks.session.settings import Request, Row, Settings
from benchmarks.session.work import Content
from minato_gpu.device import nvjpeg

GOOD = {"device_lane": {"retired": False}, "device": {"pinning_refused": None}}


def run(**more: Any) -> Run:
    """A hundred samples in half a second."""
    return Run(100, 0.5, 2.0, [0.1, 0.3], [0.01, 0.02], **more)


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        (run(stats=GOOD, made={"cpu": 60, "device": 40}), None),
        (run(stats={}, made={}), None),  # a peer
        (run(stats=GOOD, made={"cpu": 60, "device": 40}, repeated=1), None),
        (run(stats=GOOD, made={"cpu": 60, "device": 40}, repeated=2), "2 of 100 samples were prepared again"),
        (run(stats={**GOOD, "device_lane": {"retired": True}}, made={"device": 9}), "has retired"),
        (run(stats={"device_lane": [{"retired": False}, {"retired": True}]}, made={"device:0": 9}), "has retired"),
        (run(stats={**GOOD, "device": {"pinning_refused": "error 2"}}, made={"device": 9}), "refused: error 2"),
        (run(stats=GOOD, made={"cpu": 100, "device": 0}), "made none of 100"),
    ],
)
def test_a_figure_is_that_of_what_its_name_says(found: Run, complaint: str | None) -> None:
    wants_device = bool(found.made)
    if complaint is None:
        refuse_substitutes(found, wants_device=wants_device)
        return
    with pytest.raises(SubstituteError, match=complaint):
        refuse_substitutes(found, wants_device=wants_device)


# --- the row -----------------------------------------------------------------------------------------------------


def test_a_row_says_what_it_took_and_who_made_it() -> None:
    more: dict[str, Any] = {"stats": GOOD, "made": {"cpu": 25, "device": 75}, "resident_steps_s": [0.1]}
    runs = [
        run(**more, content=Content(1.0, 0.5, True), watched={"gpu_busy": 0.5, "gpu_bytes": 9}),
        run(**more, content=Content(3.0, 0.2, False), watched={"gpu_busy": 0.7, "gpu_bytes": 9}, repeated=1),
    ]
    row = summary(runs)
    wanted = {
        "samples_per_s": 200.0,
        "cpu_s_per_sample": 0.02,
        "cores_busy": 4.0,
        "device_share": 0.75,
        "step_s": 0.2,
        "step_p50_s": 0.2,
        "resident_step_s": 0.1,
        "step_slowdown": 1.0,
        "gpu_busy": 0.6,
        "max_levels": 3.0,
        "mean_levels": 0.5,
        "repeated_share": 0.005,
        "gpu_bytes": 9,
    }
    assert {name: row[name] for name in wanted} == pytest.approx(wanted)
    assert row["content_ok"] is False and row["step_p99_s"] > row["step_p50_s"] and "next_p99_s" in row
    assert summary([]) == {}
    assert not {"max_levels", "device_share", "gpu_busy", "resident_step_s"} & summary([run()]).keys()


# --- the probe ---------------------------------------------------------------------------------------------------


@pytest.fixture
def no_settings() -> Iterator[None]:
    """Nobody has set how JPEGs are decoded; what the test decides is forgotten."""
    with patch.dict(os.environ):
        for name in (nvjpeg.REGIONS, nvjpeg.ENGINE_LOAD, nvjpeg.WAITS):
            os.environ.pop(name, None)
        yield


def probed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answers: Mapping[str, Mapping[str, Any] | None]
) -> dict[str, Row]:
    """The rows of a probe whose ways come out like this; None: the process is ended."""

    def isolated(function: Any, settings: Settings, way: Way, **_: Any) -> Mapping[str, Any]:
        found = answers[way.name]
        if found is None:
            raise MeasurementError("Fatal Python error\nthe measuring process was ended by SIGSEGV without a result")
        return found

    monkeypatch.setattr("benchmarks.session.settings.isolated", isolated)
    settings = replace(Settings.usual("cpu", tmp_path, quick=True), device="cuda")
    return {row["name"]: row for row in probe.probe(Request(settings, [], time.perf_counter() + 60))}


def way_row(rate: float, wrong: int = 0) -> dict[str, Any]:
    return {"samples_per_s": rate, "wrong_while_busy": wrong, "passed": not wrong}


@pytest.mark.usefixtures("no_settings")
def test_the_fastest_way_that_is_right_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions end their process, and the engine writes too early unless the lane waits."""
    answers = {
        "regions, engine": None,
        "regions": None,
        "whole": way_row(500.0),
        "whole, engine": way_row(900.0, wrong=3),
        "whole, engine, waiting": way_row(700.0),
    }
    rows = probed(monkeypatch, tmp_path, answers)
    assert {*rows} == {*answers, probe.DECISION}
    assert rows["regions"]["error"].endswith("was ended by SIGSEGV without a result")
    decision = rows[probe.DECISION]
    assert decision["passed"] and decision["way"] == "whole, engine, waiting"
    probe.decide([{"case": "probe", **decision}])
    assert (nvjpeg.decodes_regions(), nvjpeg.engine_load(), nvjpeg.decoding_waits()) == (False, 0.9, True)
