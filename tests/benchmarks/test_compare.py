"""The comparison: one content for all loaders, a check that sees a changed or lost sample, and a run at toy size."""

from __future__ import annotations

import copy
import importlib.util
import json
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy

from benchmarks.compare.case import Alone, Case
from benchmarks.compare.content import Reader, same_content
from benchmarks.compare.loaders import CANDIDATES
from benchmarks.compare.ratios import against_peers, paired
from benchmarks.compare.run import Run, allowed
from benchmarks.compare.workloads import INDEX, Begun, job
from benchmarks.content import ContentError
from benchmarks.isolate import isolated
from benchmarks.peers import Job, Loader
from minato_gpu.report import usable_cores
from minato_gpu.stages import Tolerance
from pipelines import speech_recognition
from tests.support import programs

_KEYS = {
    "workload",
    "loader",
    "step_ms",
    "workers",
    "samples_per_s",
    "samples_per_s_spread",
    "efficiency",
    "efficiency_spread",
    "au",
    "first_batch_s",
    "epoch_gap_s",
    "wait_p99_s",
    "cpu_s_per_sample",
    "peak_pss_bytes",
    "repetitions",
}


@pytest.fixture(scope="module")
def asked(photographs: Path) -> Job:
    return job("image_classification", photographs, workers=2)


_OFTEN = ("in order", "pipeline, cpu", "pipeline, device", "pipeline, hybrid bounded")


def _on_request_if_alike(name: str) -> Any:
    """What a peer delivers changes with the peer; other settings of ours are made of the same parts."""
    often = name.removeprefix("minato_gpu ") in _OFTEN
    return pytest.param(name, marks=() if often else pytest.mark.on_request)


@pytest.mark.parametrize("name", [_on_request_if_alike(name) for name in CANDIDATES])
def test_every_loader_delivers_the_same_samples(fresh: Executor, photographs: Path, name: str) -> None:
    loader = CANDIDATES[name][0]
    if importlib.util.find_spec(loader.package.partition(".")[0]) is None:
        pytest.skip(f"{loader.package} is not installed")
    fresh.submit(isolated, _deliver, "image_classification", photographs, loader).result()


@pytest.mark.parametrize(
    "name", [pytest.param("minato_gpu pipeline, hybrid", marks=pytest.mark.on_request), "minato_gpu pipeline, device"]
)
def test_voices_through_the_device_lane(fresh: Executor, tmp_path: Path, name: str) -> None:
    """Their pipeline declares no limit of its own: its stages' limits add up."""
    speech_recognition.example_data(tmp_path)
    (tmp_path / "steps.json").write_text('{"light_rounds": 9, "heavy_rounds": 20, "every": 5}', encoding="utf-8")
    fresh.submit(isolated, _deliver, "speech_recognition", tmp_path, CANDIDATES[name][0]).result()


def _deliver(workload: str, directory: Path, loader: Loader) -> None:
    asked = job(workload, directory, workers=2)
    made, reader = loader.make(asked), Reader(asked.batch_size)
    tolerance = allowed(asked, loader)
    for batch in made:
        reader.read(batch)
        if not getattr(loader, "own_draws", False):
            same_content(copy.deepcopy(batch), asked, tolerance)
        del batch
    reader.check(len(asked.source), epochs=1)
    assert reader.late <= (8 if loader.order == "bounded" else 0 if loader.order == "in order" else 99)


def _batch(asked: Job) -> Any:
    return asked.join([asked.dataset[index] for index in range(4)])


def test_a_changed_sample_is_seen(asked: Job) -> None:
    batch = _batch(asked)
    same_content(batch, asked, None)
    batch["image"][1, 0, 0, 0] += 0.5
    with pytest.raises(ContentError, match="image of samples"):
        same_content(batch, asked, None)
    with pytest.raises(ContentError, match="image of samples"):
        same_content(batch, asked, Tolerance(2, 0.25))


def test_a_lost_sample_is_seen(asked: Job) -> None:
    reader = Reader(4)
    reader.read(_batch(asked))
    with pytest.raises(ContentError, match="once per epoch"):
        reader.check(5, epochs=1)


def test_lateness_counts_batches(asked: Job) -> None:
    reader = Reader(4)
    batch = _batch(asked)
    for first in (4, 8, 0):
        batch[INDEX] = first + batch[INDEX] % 4
        reader.read(batch)
    assert reader.late == 2


@pytest.mark.on_request  # seven seconds, of what is benchmarks' own
@pytest.mark.timeout(240)
def test_a_run_at_toy_size(tmp_path: Path) -> None:
    names = ["--loader", "pytorch in order", "--loader", "minato_gpu in order"]
    said = programs.run("benchmarks.compare", "image_classification", *names, "--quick", "--json", "-")
    rows = json.loads(said)["rows"]
    assert [row["loader"] for row in rows] == ["pytorch in order", "minato_gpu in order"]
    assert all(set(row) >= _KEYS for row in rows)
    assert all(row["samples_per_s"] > 0 and row["peak_pss_bytes"] > 1e6 and row["lateness_max"] == 0 for row in rows)


def test_paired_ratio_and_its_interval() -> None:
    """Against SciPy's own interval of the mean; what slows both by the same factor does not widen it."""
    ours, theirs = [10.0, 12.0, 11.0, 13.0], [5.0, 5.5, 6.0, 6.2]
    logs = np.log(np.divide(ours, theirs))
    interval = scipy.stats.t.interval(0.95, 3, loc=logs.mean(), scale=scipy.stats.sem(logs))
    ratio, low, high = paired(ours, theirs)
    assert (ratio, low, high) == pytest.approx((np.exp(logs.mean()), *np.exp(interval)))
    assert paired([10.0, 20.0, 5.0], [5.0, 10.0, 2.5]) == pytest.approx((2.0, 2.0, 2.0))
    assert paired([3.0], [2.0]) == pytest.approx((1.5, 0.0, float("inf")))
    with pytest.raises(ValueError, match="cannot be paired"):
        paired([1.0, 2.0], [1.0])


def _run(rate: float, cpu_s: float) -> Run:
    return Run(rate, 0.9, 0.5, 0.1, 0.1, 0.01, 0.02, 0.03, cpu_s, 0.0, "")


def test_like_is_compared_with_like() -> None:
    """In order with the best peer in order, bounded with the best out of order; a peer that failed does not count."""
    loaders = [CANDIDATES[name][0] for name in CANDIDATES]
    runs = {loader.name: [_run(10.0, 0.1), _run(11.0, 0.1)] for loader in loaders}
    runs["spdl in order"] = [_run(20.0, 0.3), _run(22.0, 0.3)]
    runs["torchdata out of order"] = [_run(30.0, 0.05), _run(33.0, 0.05)]
    runs["dali"] = [_run(99.0, 0.01)]
    of = {loader.name: against_peers(loader, loaders, runs) for loader in loaders}
    assert of["pytorch in order"] == {}
    ours = of["minato_gpu in order"]
    assert ours["best_peer"] == "spdl in order" and ours["ratio_to_peer"] == pytest.approx(0.5)
    assert ours["best_pytorch"] == "pytorch in order" and ours["ratio_to_pytorch"] == pytest.approx(1.0)
    assert ours["cpu_ratio_to_peer"] == pytest.approx(1.0)
    bounded = of["minato_gpu bounded"]
    assert bounded["best_peer"] == "torchdata out of order" and bounded["ratio_to_peer_high"] == pytest.approx(1 / 3)
    assert bounded["thriftiest_peer"] == "torchdata out of order" and bounded["cpu_ratio_to_peer"] == pytest.approx(2)


def test_what_one_process_needs(fresh: Executor, photographs: Path) -> None:
    alone = fresh.submit(isolated, _alone, photographs).result()
    assert len(alone.costs_s) >= 8 and alone.cpu_s >= alone.costs_s.sum() > 0
    assert alone.sample_bytes >= 3 * 4


def _alone(photographs: Path) -> Alone:
    return Alone.measured(job("image_classification", photographs, workers=1), repeats=1)


def test_the_bound_is_that_of_the_work_which_was_done() -> None:
    costs_s = np.full(100, 0.1)
    case = Case("any", Path(), 2, 0.0, 2, 100, 10, 10.0, 0.5, 0.3, sample_bytes=1, overshoot_s=0.0, costs_s=costs_s)
    cores = usable_cores()
    assert case.bound_s(in_order=False) == pytest.approx(0.3 + 20 / cores)
    assert case.bound_s(1.0, 1.0, in_order=False) == pytest.approx(max(0, 0.3 - 1 / cores) + 20 / cores)
    assert case.bound_s(0.0, 1.0, in_order=True) == pytest.approx(0.5 + 21 / cores)
    assert case.bound_s(1.0, 0.0, in_order=True) == pytest.approx(max(0, 0.5 - 1 / cores) + 19 / cores)


def test_work_for_later_epochs_is_known() -> None:
    begun = Begun(4)
    begun.counts[:] = [2, 3, 1, 4]
    assert begun.beyond(2).sum() == 3
    assert begun.work_s(2, np.array([1.0, 10.0, 100.0, 1000.0])) == pytest.approx(2010.0)
