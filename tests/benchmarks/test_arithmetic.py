"""Arithmetic of the benchmarks: bounds, ratios and their intervals, published costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.compare.ratios import against_peers
from benchmarks.compare.run import CANDIDATES, Case, Run
from benchmarks.data import detection, volumes
from benchmarks.data.__main__ import WORKLOADS
from benchmarks.data.published import SPREADS, Curve, measured, sizes_of_mixture
from benchmarks.tails import CASES, Plan
from benchmarks.turns import paired
from minato_gpu.samples import sample_seed
from minato_gpu.util.threads import usable_cores

# --- tails ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead_s", [0.0, 0.5, 100.0])
def test_work_done_ahead_lowers_the_bound(ahead_s: float) -> None:
    plan = _plan()
    assert plan.bound_s(ahead_s) <= plan.bound_s()
    assert plan.bound_s(ahead_s) >= plan.epochs * plan.batches * plan.step_s


def test_the_step_asks_for_the_load_of_the_case() -> None:
    plan = _plan()
    assert plan.cpu_s / usable_cores() / (plan.batches * plan.step_s) == pytest.approx(plan.case.load)


def _plan() -> Plan:
    return Plan.measured(CASES[1], workers=2, per_ms=20.0, overshoot_s=0.0, quick=True)


# --- the comparison ---------------------------------------------------------------------------------------------------


def test_paired_ratio_and_its_interval() -> None:
    """What slows both by the same factor does not widen it; of five pairs it covers the truth as often as it says."""
    rng = np.random.default_rng(1)
    found = [paired(np.exp(rng.normal(0.1, 0.2, 5)).tolist(), [1.0] * 5) for _ in range(200)]
    assert all(low <= ratio <= high for ratio, low, high in found)
    assert 0.9 <= np.mean([low <= np.exp(0.1) <= high for _, low, high in found]) < 0.99
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
    runs["dali readers"] = [_run(99.0, 0.01)]
    of = {loader.name: against_peers(loader, loaders, runs) for loader in loaders}
    assert of["pytorch in order"] == {}
    ours = of["minato_gpu in order"]
    assert ours["best_peer"] == "spdl in order" and ours["ratio_to_peer"] == pytest.approx(0.5)
    assert ours["cpu_ratio_to_peer"] == pytest.approx(1.0)
    bounded = of["minato_gpu bounded"]
    assert bounded["best_peer"] == "torchdata out of order" and bounded["ratio_to_peer_high"] == pytest.approx(1 / 3)
    assert bounded["thriftiest_peer"] == "torchdata out of order" and bounded["cpu_ratio_to_peer"] == pytest.approx(2)


def test_the_bound_is_that_of_the_work_which_was_done() -> None:
    costs_s = np.full(100, 0.1)
    case = Case("any", Path(), 2, 0.0, 100, 10, 20.0, 0.5, 0.3, sample_bytes=1, overshoot_s=0.0, costs_s=costs_s)
    cores = usable_cores()
    assert case.bound_s(in_order=False) == pytest.approx(0.3 + 20 / cores)
    assert case.bound_s(1.0, 1.0, in_order=False) == pytest.approx(max(0, 0.3 - 1 / cores) + 20 / cores)
    assert case.bound_s(0.0, 1.0, in_order=True) == pytest.approx(0.5 + 21 / cores)
    assert case.bound_s(1.0, 0.0, in_order=True) == pytest.approx(max(0, 0.5 - 1 / cores) + 19 / cores)


# --- data with the published spread of cost ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["object_detection", "segmentation_3d"])
def test_relative_costs_have_the_published_ratios(name: str) -> None:
    relative = SPREADS[name].relative(2001)
    assert np.median(relative) == pytest.approx(1.0, rel=0.01)
    for ratio, value in measured(relative).items():
        assert value == pytest.approx(SPREADS[name].ratios[ratio], rel=0.03), ratio


def test_sizes_give_a_mixture_the_wanted_spread() -> None:
    """Two fifths of the samples cost 1.4 times as much as others of their size, whichever they are."""
    usual = Curve([1e-3, 1e3], [1e-3, 1e3])
    dear = Curve([1e-3, 1e3], [1.4e-3, 1.4e3])
    wanted = SPREADS["segmentation_3d"].relative(1000)
    sizes = sizes_of_mixture(wanted, [(0.6, usual), (0.4, dear)])
    rng = np.random.default_rng(0)
    costs = sizes * np.where(rng.random((50, 1000)) < 0.4, 1.4, 1.0)
    found = measured(costs.reshape(-1))
    for ratio in ("mean", "p75", "p90"):
        assert found[ratio] == pytest.approx(SPREADS["segmentation_3d"].ratios[ratio], rel=0.15), ratio


@pytest.fixture
def _fewer_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """What sizes cost is tried at few of them; the spread of the costs is then rough."""
    monkeypatch.setattr(detection, "_PROBES", np.linspace(1.0, 3.0, 5))
    monkeypatch.setattr(volumes, "_PROBES", np.geomspace(5e3, 5e5, 4))


@pytest.mark.on_request  # six seconds, of what is benchmarks' own
@pytest.mark.usefixtures("_fewer_trials")
@pytest.mark.parametrize("name", list(WORKLOADS))
def test_a_small_set_of_each_kind_can_be_read_and_prepared(name: str, tmp_path: Path) -> None:
    workload, directory = WORKLOADS[name], tmp_path / "data"
    directory.mkdir()
    assert list(workload.write(directory, 16))[-1] == 16
    dataset, pipeline = workload.dataset(directory), workload.pipeline(directory)
    assert len(dataset) == 16
    for index in (0, 15):
        sample = pipeline.run(dataset[index], sample_seed(0, 0, index, 0))
        assert set(sample) == set(pipeline.outputs)
