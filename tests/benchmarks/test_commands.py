"""Each benchmark runs at toy size; its document has the keys that are promised and its figures make sense.

Those that take long run on request: what they measure is benchmarks' own, and no promise of the package.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import cost_model
from benchmarks.peers import COSTLY, TRIVIAL, Job, Loader, choose, installed
from benchmarks.tail_run import Plan
from minato_gpu import Pipeline
from tests.support import programs

_TAIL_KEYS = {
    "case",
    "loader",
    "efficiency",
    "efficiency_spread",
    "simulated_efficiency",
    "simulated_with_overhead",
    "first_batch_s",
    "first_batch_spread_s",
    "peak_bytes_in_flight",
    "peak_rss_bytes",
    "elapsed_s",
    "bound_s",
    "emulated_step_s",
    "repetitions",
}


def _document(*command: str) -> dict[str, Any]:
    """Standard output of the benchmark, which must be one JSON document and nothing else."""
    return _checked(programs.run(f"benchmarks.{command[0]}", "--quick", "--json", "-", *command[1:]))


def _checked(said: str) -> dict[str, Any]:
    """The document, with what every one holds."""
    document: dict[str, Any] = json.loads(said)
    assert {"date", "machine", "versions", "settings", "rows"} <= set(document)
    assert document["machine"]["cores"] >= 1
    assert {"torch", "spdl", "torchdata"} <= set(document["versions"])
    assert document["settings"]["quick"] is True
    return document


def _present(loaders: tuple[Loader, ...]) -> set[str]:
    return {loader.name for loader in loaders if installed(loader)}


def test_cost_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of which a photograph takes a millisecond, and one more for each million pixels: on a real one it
    takes what others leave of the cores."""
    now, each, features = 0.0, 0.0, Pipeline.features

    def told(pipeline: Pipeline, fields: Any) -> tuple[float, ...]:
        nonlocal each
        height, width = fields["size"]
        each = 1e-3 + 1e-9 * float(height) * float(width)
        return features(pipeline, fields)

    def clock() -> float:
        nonlocal now
        now += each
        return now

    monkeypatch.setattr(Pipeline, "features", told)
    monkeypatch.setattr(cost_model, "time", SimpleNamespace(perf_counter=clock))
    result = CliRunner().invoke(cost_model.main, ["--quick", "--json", "-"], catch_exceptions=False)
    rows = _checked(result.stdout)["rows"]
    assert [(row["lane"], row["epoch"]) for row in rows] == [("cpu", 1), ("device", 1), ("cpu", 2), ("device", 2)]
    assert all(30 <= row["samples"] <= 40 and row["mean_s"] > 0 for row in rows)
    assert all(0 < row["log_sigma"] < 2 and 0 < row["rank_correlation"] <= 1 for row in rows)


@pytest.mark.on_request  # see the module's head
def test_trace_cost() -> None:
    rows = _document("trace_cost")["rows"]
    assert [row["case"] for row in rows] == ["trivial", "computed", "slept", "image_classification"]
    assert all(row["ratio"] > 0 and row["bytes_per_sample"] > 1 and row["pairs"] == 2 for row in rows)


@pytest.mark.on_request  # see the module's head
def test_caches() -> None:
    rows = _document("caches")["rows"]
    alike, unlike, decisions = (
        [row for row in rows if word in row["case"]] for word in ("equal", "unlike", "decisions")
    )
    alike = [row for row in alike if row not in decisions]
    drawn = [row for row in rows if "drawn" in row["case"]]
    assert len(drawn) == 3 * 4 * 4 and all(0 < row["of_belady"] <= 1.01 for row in drawn)
    assert len(alike) == 4 * 4 * 4 and len(unlike) == 4 * 4 * 4 and len(decisions) == 3
    for row in alike:
        assert {"hit_rate_spread", "hit_rate_min", "hit_rate_max"} <= set(row) and 0 <= row["hit_rate"] <= row[
            "belady"
        ] * 1.01
        if row["shards"] == 1 and row["policy"] != "lru":
            assert row["hit_rate"] == row["belady"] == row["cache_share"] == pytest.approx(row["bound"])
        if row["policy"] == "next-use":
            assert row["of_belady"] >= 0.98 and row["look_ahead"] >= 1
    measured = {row["policy"]: row for row in rows if "measured" in row["case"]}
    assert measured["minio"]["hit_rate"] == 0.5 and measured["minio"]["of_hits"] == 1.0
    assert measured["minio"]["epoch_s"] > 0 and measured["lru"]["hit_rate"] < 0.5
    assert all(0 < row["saved_share"] < 1 for row in unlike)
    assert all(row["us_per_access"] > 0 and ("begin_s" in row) == (row["policy"] == "next-use") for row in decisions)


@pytest.mark.on_request  # see the module\'s head
def test_saves() -> None:
    rows = _document("saves")["rows"]
    assert {row["window"] for row in rows} == {256, 4096}
    assert len({row["mode"] for row in rows}) == 8 and len(rows) == 16
    for row in rows:
        assert 0 < row["save_p50_us"] <= row["save_p99_us"] and row["save_cpu_p99_us"] > 0
        assert 0 < row["own_bytes"] <= row["state_bytes"]
        assert row["batch_us"] > 0 and row["saved_batch_us"] > 0
        if row["mode"] != "sampler's state, permuted":  # else a bit for each index
            assert row["own_bytes"] < 1024 + row["window"] / 8 * 4 / 3 + 4


@pytest.mark.on_request  # see the module\'s head
@pytest.mark.timeout(180)
def test_overhead() -> None:
    document = _document("overhead")
    loaders = [row for row in document["rows"] if "samples_per_s" in row]
    assert _present(TRIVIAL) <= {row["loader"] for row in loaders}
    assert all(row["samples_per_s"] > 0 and "samples_per_s_spread" in row for row in loaders)
    pytorch = [row for row in loaders if row["loader"].startswith("pytorch")]
    assert max(row["ratio_to_best_pytorch"] for row in pytorch) == 1.0
    decisions = [row for row in document["rows"] if "scheduler_us_per_sample" in row]
    assert {row["window"] for row in decisions} == {256, 4096}
    assert all(0 < row["scheduler_us_per_sample"] < 1e4 for row in decisions)
    assert {row["samples"].split(",")[0] for row in decisions} == {"costly", "trivial"}


@pytest.mark.on_request  # see the module\'s head
@pytest.mark.timeout(180)
def test_tails() -> None:
    rows = _document("tails", "--case", "scattered, 81", "--loader", "in order", "--loader", "bounded")["rows"]
    assert {row["case"] for row in rows} == {"scattered, 81 %"}
    asked = {loader for loader in _present(COSTLY) if "in order" in loader or "bounded" in loader}
    assert asked == {row["loader"] for row in rows} and len(asked) > 2
    _check_tails(rows)


@pytest.mark.on_request  # see the module\'s head
@pytest.mark.timeout(180)
def test_rare() -> None:
    rows = _document("tails", "--case", "rare", "--loader", "in order")["rows"]
    assert {row["case"] for row in rows} == {"rare, 81 %"}
    assert {loader for loader in _present(TRIVIAL) if "in order" in loader} == {row["loader"] for row in rows}
    _check_tails(rows)


def _check_tails(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert set(row) >= _TAIL_KEYS
        assert 0 < row["efficiency"] <= 1.05
        assert row["elapsed_s"] > 0
        assert 0 < row["first_batch_s"] < 60
        assert row["peak_bytes_in_flight"] > 0
        assert row["peak_rss_bytes"] > 1_000_000


@pytest.mark.on_request  # see the module\'s head
@pytest.mark.timeout(180)
def test_short_epochs() -> None:
    document = _document("tails", "--case", "short epochs, 105", "--loader", "in order")
    assert {"pytorch in order", "spdl processes in order"} <= {row["loader"] for row in document["rows"]}


@pytest.mark.on_request  # see the module\'s head
@pytest.mark.timeout(180)
def test_large() -> None:
    document = _document("large")
    assert {row["sampler"] for row in document["rows"]} == {"sequential", "random"}
    for row in document["rows"]:
        assert row["indices"] == document["settings"]["indices"]
        assert row["start_s"] > 0
        assert {"start_beyond_sampler_s", "held_bytes_per_index", "reserved_bytes_per_index"} <= set(row)


def test_a_name_that_fits_no_loader_is_refused() -> None:
    with pytest.raises(ValueError, match="no loader is called 'torhc'"):
        choose(COSTLY, ["torhc"])


@pytest.mark.parametrize("ahead_s", [0.0, 0.5, 100.0])
def test_work_done_ahead_lowers_the_bound(ahead_s: float) -> None:
    plan = _plan()
    assert plan.bound_s(ahead_s) <= plan.bound_s()
    assert plan.bound_s(ahead_s) >= plan.epochs * plan.batches * plan.step_s


def test_the_step_asks_for_the_load_of_the_case() -> None:
    plan = _plan()
    assert plan.cpu_s / plan.cores / (plan.batches * plan.step_s) == pytest.approx(plan.case.load)


def test_a_job_keeps_a_short_last_batch() -> None:
    assert Job(range(5), 2, 1, 8).batches == [[0, 1], [2, 3], [4]]


def _plan() -> Plan:
    from benchmarks.cases import CASES

    return Plan.measured(CASES[1], workers=2, per_ms=20.0, overshoot_s=0.0, quick=True)


@pytest.mark.on_request  # see the module's head
def test_whatif() -> None:
    document = _document("whatif", "--question", "cache", "--question", "latency")
    assert document["settings"]["preparation"] == "emulated: slept"
    rows = [row for row in document["rows"] if row["case"] != "summary"]
    assert [(row["question"], row["setting"]) for row in rows] == [
        ("cache", "no cache"),
        ("cache", "minio 0.5"),
        ("cache", "next-use 0.5"),
        ("cache", "lru 0.5"),
        ("latency", "20 ms"),
    ]
    for row in rows:
        assert row["workload"] == "image_classification" and row["predicted_s"] > 0 and row["measured_s"] > 0
        assert row["low_s"] <= row["predicted_s"] <= row["high_s"] and row["spread_s"] >= 0
        assert row["predicted_reads"] == pytest.approx(row["measured_reads"], abs=3)
    summary = [row for row in document["rows"] if row["case"] == "summary"]
    assert [(row["question"], row["points"]) for row in summary] == [("cache", 4), ("latency", 1), ("all", 5)]


@pytest.mark.on_request  # see the module's head
def test_worker_count() -> None:
    rows = _document("worker_count")["rows"]
    assert [row["workers"] for row in rows] == ["num_workers=2", "num_workers=2, max_workers=16", "num_workers=16"]
    assert all(row["samples_per_s"] > 0 for row in rows)
    assert rows[0]["at_work"] == 2 and rows[2]["at_work"] == 16 and 2 <= rows[1]["at_work"] <= 16


@pytest.mark.on_request  # see the module's head
def test_busy() -> None:
    rows = _document("busy")["rows"]
    assert {row["busy"] for row in rows} == {0, 2} and all(row["of_bound"] > 0 for row in rows)
    assert {row["loader"] for row in rows if row["loader"].startswith("minato_gpu")} == {
        *("minato_gpu in order", "minato_gpu bounded")
    }
    assert all("ratio_to_pytorch" in row for row in rows if row["loader"].startswith("minato_gpu"))
    ways = _document("busy", "--step")["rows"]
    assert len(ways) == 3 and all(row["late_p99_us"] >= row["late_p50_us"] > 0 for row in ways)
