"""What a GPU session takes for a figure, and what it refuses: the CPU standing in for the device, without a word."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.isolate import MeasurementError
from benchmarks.session import loaders, measure, probe, steps, work
from benchmarks.session.measure import Run, SubstituteError, refuse_substitutes, summary
from benchmarks.session.price import priced_rows
from benchmarks.session.probe import CAREFUL, Way
from benchmarks.session.settings import Request, Row, Settings
from benchmarks.session.targets import targets
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


def test_a_lane_that_is_spared_is_no_substitute() -> None:
    refuse_substitutes(run(stats=GOOD, made={"cpu": 100, "device": 0}), wants_device=False)


@pytest.mark.parametrize(("repeated", "retired"), [(0, False), (1, False), (2, False), (0, True)])
def test_a_loader_is_asked_who_has_made_its_samples(repeated: int, retired: bool) -> None:
    stats = {"samples_repeated": repeated, "samples_delivered": 100, "device_lane": {"retired": retired}}
    loader = SimpleNamespace(stats=lambda: stats)
    if repeated < 2 and not retired:
        measure.made_by_device(loader)
        return
    with pytest.raises(SubstituteError, match=r"has retired|were prepared again"):
        measure.made_by_device(loader)


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


class Slow:
    """A loader each of whose batches takes so many seconds of a clock that stands still otherwise."""

    name, ordered, own_draws, fancy_upsampling = "slow", True, True, False

    def __init__(self, batch_s: float, passed: list[float]) -> None:
        self._batch_s, self._passed = batch_s, passed

    def make(self, *_: Any) -> Any:
        while True:
            self._passed[0] += self._batch_s
            yield {"image": torch.zeros(4, 3, 2, 2), "label": torch.zeros(4, dtype=torch.int64)}

    def tolerance(self, *_: Any) -> None:
        return None


def clocked(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of a clock by which runs are measured, whose batches nobody looks at."""
    passed = [0.0]
    for module in (measure, steps):
        monkeypatch.setattr(module, "perf_counter", lambda: passed[0])
    monkeypatch.setattr(work.Taken, "add", lambda *_: None)
    monkeypatch.setattr(work.Taken, "check", lambda *_, **__: Content())
    return passed


@pytest.mark.parametrize(
    ("batch_s", "timed", "rough"), [(0.1, 30, False), (1.4, 3, False), (2.0, 2, True), (9.0, 1, True)]
)
def test_a_run_takes_no_longer_for_a_slow_loader(
    photographs: Path, monkeypatch: pytest.MonkeyPatch, batch_s: float, timed: int, rough: bool
) -> None:
    """It takes its start, ``warm_s``, ``timed_s``, and what the batches take that were asked for just before."""
    passed = clocked(monkeypatch)
    usual = replace(Settings.usual("cpu", photographs, quick=True), warm_s=3.0, timed_s=3.0)
    slow: Any = Slow(batch_s, passed)
    found = measure.loaded(usual, slow, steps.make(steps.EMPTY, usual))
    assert len(found.nexts_s) == pytest.approx(timed, abs=1 if batch_s < 1 else 0)
    assert passed[0] <= batch_s + (3.0 + batch_s) + (3.0 + batch_s) + 1e-6
    assert ("rough" in summary([found])) is rough


class Opening(loaders.Ours):
    """This loader, whose device lane makes nothing before so many seconds of a clock have passed, then half of all."""

    def make(self, *_: Any) -> Any:
        opened_s, passed = clocks[self.name]

        def stats(_: Any) -> Any:
            made = max(0.0, passed[0] - opened_s)
            lane = {"retired": False, "spared": False, "micro_batch": 2}
            return {**GOOD, "device_lane": lane, "lanes": {"cpu": {"samples": 1}, "device": {"samples": 20 * made}}}

        return type("Loader", (), {"__iter__": lambda _: Slow(0.1, passed).make(), "stats": stats})()


clocks: dict[str, tuple[float, list[float]]] = {}


@pytest.mark.parametrize(("opened_s", "warm_s", "rough"), [(0.0, 3.0, False), (6.0, 6.8, False), (99.0, 15.0, True)])
def test_a_run_is_timed_once_its_device_lane_is_at_work(
    photographs: Path, monkeypatch: pytest.MonkeyPatch, opened_s: float, warm_s: float, rough: bool
) -> None:
    passed = clocked(monkeypatch)
    usual = replace(Settings.usual("cpu", photographs, quick=True), warm_s=3.0, opening_s=15.0, timed_s=3.0)
    monkeypatch.setitem(clocks, "hybrid", (opened_s, passed))
    ours = Opening("hybrid", ("cpu", "device"), 1)
    found = measure.loaded(usual, ours, steps.make(steps.EMPTY, usual))
    assert passed[0] == pytest.approx(warm_s + 3.0, abs=0.35) and len(found.nexts_s) == pytest.approx(30, abs=1)
    assert summary([found]).get("rough") == ("the device lane was still opening" if rough else None)


def test_no_lane_is_waited_for_that_gets_nothing_to_do() -> None:
    lane = {"micro_batch": 8, "retired": False, "spared": False}
    lanes = {"cpu": {"samples": 999}, "device": {"samples": 8 * measure.AT_WORK - 1}}
    assert not measure.at_work({"lanes": lanes, "device_lane": lane})
    assert measure.at_work({"lanes": lanes, "device_lane": {**lane, "spared": True}})
    assert measure.at_work({"lanes": lanes, "device_lane": {**lane, "retired": True}})
    assert measure.at_work({"lanes": {"device": {"samples": 8 * measure.AT_WORK}}, "device_lane": lane})
    assert not measure.at_work({"lanes": lanes, "device_lane": [lane, lane]})


def test_a_rate_of_a_few_batches_says_so() -> None:
    assert summary([run(), run()])["rough"] == "only 2 timed batches in a run"
    why = "only 2 timed batches in a run; the device lane was still opening"
    assert summary([run(), run(rough="the device lane was still opening")])["rough"] == why


# --- the probe ---------------------------------------------------------------------------------------------------


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody has set how JPEGs are decoded; what the test decides is forgotten."""
    before = dict(os.environ)
    for name in (nvjpeg.REGIONS, nvjpeg.ENGINE_LOAD, nvjpeg.WAITS):
        monkeypatch.delenv(name, raising=False)
    yield
    for name in (nvjpeg.REGIONS, nvjpeg.ENGINE_LOAD, nvjpeg.WAITS):
        os.environ.pop(name, None)
    os.environ.update(before)


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


@pytest.mark.usefixtures("no_settings")
def test_where_no_way_is_right_the_careful_one_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = dict.fromkeys(("regions, engine", "whole, engine", "regions", "whole"))
    decision = probed(monkeypatch, tmp_path, answers)[probe.DECISION]
    assert not decision["passed"] and decision["environment"] == CAREFUL.environment
    os.environ[nvjpeg.ENGINE_LOAD] = "0.5"
    probe.decide([{"case": "probe", **decision}])
    assert nvjpeg.engine_load() == 0.5 and nvjpeg.WAITS not in os.environ, "what its user has decided stands alone"
    del os.environ[nvjpeg.ENGINE_LOAD]
    probe.decide([{"case": "probe", **decision}])
    assert (nvjpeg.decodes_regions(), nvjpeg.engine_load(), nvjpeg.decoding_waits()) == (False, 0.0, True)


# --- the price of device work, and which targets are met --------------------------------------------------------------


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
    assert len(rows) == 5
    assert all(row["measured"] is None and row["met"] is None for row in rows)


@pytest.mark.parametrize(("hybrid", "met"), [((28.0, 27.5), True), ((26.0, 26.5), False)])
def test_hybrid_of_sum(hybrid: tuple[float, float], met: bool) -> None:
    """Of 15 and 20 samples/s; the device lane takes two of the six cores that the CPU lane needs for its own."""
    rows = [
        loader_row("rates", "cpu", 15, 15, cores_busy_each=[6.0, 6.0]),
        loader_row("rates", "device", 20, 20, 20, cores_busy_each=[2.0, 2.0, 2.0]),
    ]
    row = found([*rows, loader_row("rates", "hybrid", *hybrid)], "hybrid_of_sum", "rates")
    assert row["met"] is met and row["measured_low"] < row["measured"] < row["measured_high"]
    assert row["measured"] == pytest.approx(np.sqrt(hybrid[0] * hybrid[1]) / 30)


def test_without_a_step_the_best_peer_must_be_beaten_by_half() -> None:
    rows = [loader_row("rates", "hybrid", 30.0), loader_row("rates", "spdl", 10.0)]
    assert found(rows, "ratio_to_best_peer", "rates")["met"] is True
    rows += [loader_row("rates", "dali", 25.0), {"case": "rates", "name": "pytorch", "missing": "not here"}]
    row = found(rows, "ratio_to_best_peer", "rates")
    assert (row["best_peer"], row["met"], row["target"]) == ("dali", False, 1.5)
    assert row["measured"] == pytest.approx(1.2) and row["bottleneck"] == "preparation"


@pytest.mark.parametrize(("resident_step_s", "target"), [(100 / 14.0, 1.0), (100 / 16.0, 1.5)])
def test_training_must_be_faster_where_it_can_be(resident_step_s: float, target: float) -> None:
    rows = [loader_row("training", "hybrid", 12.0, resident_step_s=resident_step_s), loader_row("training", "dali", 10)]
    row = found(rows, "ratio_to_best_peer", "training")
    assert row["target"] == target and row["met"] is (target == 1.0)


def test_limits_of_memory() -> None:
    rows: list[dict[str, Any]] = [
        {"case": "memory", "name": "hybrid", "device_bytes_peak": 1_000_000_000},
        {"case": "memory", "name": "hybrid, budget", "device_bytes_peak": 999_999_999},
    ]
    met = {(row["name"], row["case"]): row["met"] for row in targets(rows) if row["measured"] is not None}
    assert met == {
        ("device_bytes_peak", "memory, hybrid"): False,
        ("device_bytes_peak", "memory, hybrid, budget"): True,
    }
