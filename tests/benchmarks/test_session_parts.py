"""Loaders of a GPU session take turns: which are tuned, run, and left out, as far as time goes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.isolate import MeasurementError
from benchmarks.session import loaders, parts
from benchmarks.session.dali import DaliGpu
from benchmarks.session.measure import Run
from benchmarks.session.record import NO_TIME, Rows
from benchmarks.session.request import Request
from benchmarks.session.settings import Settings
from minato_gpu.engine import building

ABOUT = {"benchmark": "gpu_session", "settings": {"commit": "abc", "quick": True}, "machine": {"gpus": ["H"]}}


def settings(tmp_path: Path) -> Settings:
    return Settings.usual("cpu", tmp_path, quick=True)


def test_a_peer_that_is_not_installed_says_so(tmp_path: Path) -> None:
    asked = Request(settings(tmp_path), [], time.perf_counter() + 60)
    absent = replace(DaliGpu("dali", 1), package="nvidia.no_such_package")
    (row,) = parts._turns(asked, [[absent]], "mixed", "empty", _never)
    assert row["name"] == "dali" and row["missing"] == "nvidia.no_such_package is not installed"
    assert "error" not in row


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("it was run")


@pytest.mark.parametrize("quick", [True, False])
def test_all_that_is_tried_can_be_tried(quick: bool, tmp_path: Path) -> None:
    bases: dict[str, Any] = {"hybrid": parts.hybrid(settings(tmp_path)), **loaders.peers(settings(tmp_path))}
    for name, changes in loaders.changes(quick=quick).items():
        for change in changes:
            assert parts.changed(bases[name], {**bases[name].settings(), **change}) != bases[name]


def test_a_smaller_micro_batch_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the usual size is the most that there is: a quarter of the batch."""
    options: Any = SimpleNamespace(devices=[None], device=torch.device("cuda"))
    loader: Any = SimpleNamespace(batch_size=256, batch_sampler=object(), dataset=[])
    plan, usual = building.Plan(loader, options), building.MOST_ON_GPU
    sizes = {usual}
    for change in loaders.changes(quick=False)["hybrid"]:
        monkeypatch.setattr(building, "MOST_ON_GPU", change.get("micro_batch", usual))
        sizes.add(plan.micro_batch)
    assert len(sizes) == 2 and max(sizes) == usual


def ran(rate: float, **more: Any) -> Run:
    """A run of 100 samples."""
    return Run(100, 100 / rate, 1.0, [0.25], [0.5], **more)


def test_tuning_keeps_what_is_faster_and_gives_everybody_as_many_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[str, dict[str, Any]]] = []

    def run(asked: Request, contender: Any, *rest: Any) -> Run:
        tried.append((contender.name, contender.settings()))
        if contender.name == "hybrid":
            return ran(1.0 + contender.workers)
        if contender.hw_decoder_load == 0.0:
            raise MeasurementError("no such engine")
        return ran(1.0 + (contender.threads == 8) + 4.0 * (contender.prefetch == 3 and contender.threads == 8))

    changes = {
        "dali": ({"threads": 8}, {"hw_decoder_load": 0.0}, {"prefetch": 3}, {"exec_dynamic": False}),
        "hybrid": ({"workers": 7},),
    }
    monkeypatch.setattr(loaders, "peers", lambda settings: {"dali": DaliGpu("dali", 16)})
    monkeypatch.setattr(loaders, "changes", lambda quick: changes)
    monkeypatch.setattr(loaders, "available", lambda contender: True)
    monkeypatch.setattr(parts, "_run", run)
    told = [*parts.tune(Request(settings(tmp_path), [], time.perf_counter() + 600))]
    assert [name for name, _ in tried] == ["hybrid", "dali", "hybrid", "dali", "dali", "dali", "dali"]
    last = {row["name"]: row for row in told}
    assert [one.get("samples_per_s") for one in last["dali"]["tried"]] == [1.0, 2.0, None, 6.0, 6.0]
    assert last["dali"]["tried"][2]["error"] == "no such engine"
    assert last["dali"]["loader_settings"]["prefetch"] == 3 and last["dali"]["samples_per_s"] == 6.0
    assert last["hybrid"]["loader_settings"]["workers"] == 7
    rows = [{"case": "tune", **row} for row in last.values()]
    asked = Request(settings(tmp_path), rows, time.perf_counter() + 600)
    assert [one.workers for one in parts.chosen_ours(asked)] == [7, 7, 7]
    (dali,) = parts.chosen_peers(asked)
    assert dali.settings() == last["dali"]["loader_settings"]


def test_a_peer_that_was_found_to_be_slow_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bases = {name: DaliGpu(name, 2) for name in ("slow", "fast", "untuned")}
    monkeypatch.setattr(loaders, "peers", lambda settings: bases)
    monkeypatch.setattr(parts, "_run", lambda *_: ran(5.0))
    tuned: Rows = [
        {
            "case": "tune",
            "name": name,
            "samples_per_s": rate,
            "loader_settings": bases[name].settings(),
            "tried": [{}, {}],
        }
        for name, rate in (("slow", 4.0), ("fast", 9.0))
    ]
    usual = replace(settings(tmp_path), quick=False, repetitions=1)
    rows = {row["name"]: row for row in parts.rates(Request(usual, tuned, time.perf_counter() + 600))}
    assert "less than" in rows["slow"]["missing"] and list(rows)[1:3] == ["hybrid", "fast"]
    tries = {name: row["tries"] for name, row in rows.items() if "missing" not in row}
    assert tries == {"hybrid": 0, "fast": 2, "cpu": 0, "device": 0, "untuned": 0}


def test_claims_have_two_repetitions_before_others_have_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran_: list[str] = []

    def run(request: Request, contender: Any, *rest: Any) -> Run:
        ran_.append(contender.name)
        return ran(5.0)

    monkeypatch.setattr(loaders, "peers", lambda settings: {name: DaliGpu(name, 2) for name in ("a", "b")})
    monkeypatch.setattr(parts, "_run", run)
    usual = replace(settings(tmp_path), repetitions=3)
    assert [*parts.rates(Request(usual, [], time.perf_counter() + 600))]
    first = ["hybrid", "a", "cpu", "device"]
    assert ran_ == [*first, *first, "b", *first, "b"]
    ran_.clear()
    assert [*parts.cores(Request(usual, [], time.perf_counter() + 600))]
    assert ran_ == ["hybrid", "hybrid", "a", "a", "cpu", "cpu", "b", "b"], "on four cores and on eight"


def test_no_run_begins_without_time_for_it(tmp_path: Path) -> None:
    """As one as long as the longest so far; and one that has failed is not run again."""
    now = time.perf_counter()
    ours = loaders.ours(1)
    asked = Request(settings(tmp_path), [], now + 1000)

    def run(contender: loaders.Contender) -> Run:
        if contender.name == "device":
            raise MeasurementError("one\ntwo")
        runs.append(contender.name)
        if len(runs) == 3:
            object.__setattr__(asked, "deadline", now)
        return ran(7.0)

    runs: list[str] = []
    rows = [*parts._turns(asked, [ours] * 5, "mixed", "empty", run)]
    assert runs == ["cpu", "hybrid", "cpu"]
    assert [(row["name"], row.get("repetitions"), row.get("error")) for row in rows] == [
        *(("cpu", 1, None), ("device", None, "one\ntwo"), ("hybrid", 1, None), ("cpu", 2, None))
    ]
    late = [*parts._turns(asked, [ours], "mixed", "empty", _never)]
    assert [row["missing"] for row in late] == [NO_TIME] * 3
