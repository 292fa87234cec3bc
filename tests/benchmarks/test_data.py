"""Data with the published spread of cost: the arithmetic, and a small set of each kind in its real format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.data import detection, volumes
from benchmarks.data.__main__ import WORKLOADS
from benchmarks.data.measure import Curve, sizes_of_mixture
from benchmarks.data.published import SPREADS, measured
from minato_gpu.samples import sample_seed


@pytest.mark.parametrize("name", ["object_detection", "segmentation_3d"])
def test_relative_costs_have_the_published_ratios(name: str) -> None:
    relative = SPREADS[name].relative(2001)
    assert np.median(relative) == pytest.approx(1.0, rel=0.01)
    for ratio, value in measured(relative).items():
        assert value == pytest.approx(SPREADS[name].ratios[ratio], rel=0.03), ratio


def test_a_curve_is_its_own_inverse_and_never_falls() -> None:
    curve = Curve([1.0, 2.0, 4.0, 8.0], [1.0, 3.0, 2.5, 20.0])  # a noisy measurement in the middle
    sizes = np.geomspace(1, 8, 50)
    seconds = curve.seconds(sizes)
    assert (np.diff(seconds) > 0).all()
    assert curve.sizes(seconds) == pytest.approx(sizes, rel=1e-3)


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
    assert list(workload.write(directory, 16, 0))[-1] == 16
    dataset, pipeline = workload.dataset(directory), workload.pipeline(directory)
    assert len(dataset) == 16
    for index in (0, 15):
        sample = pipeline.run(dataset[index], sample_seed(0, 0, index, 0))
        assert set(sample) == set(pipeline.outputs)
