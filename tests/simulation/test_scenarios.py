"""What scenarios draw: costs as published, and surprises that no prediction knows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from minato_gpu.simulation.catalogue import SCENARIOS
from minato_gpu.simulation.scenarios import published_costs


@pytest.mark.parametrize(
    ("quantiles", "mean", "std"), [((11, 28, 30, 35, 176), 31, 19), ((10, 470, 630, 750, 2230), 500, 197)]
)
def test_costs_follow_the_published_table(
    quantiles: tuple[float, float, float, float, float], mean: float, std: float
) -> None:
    costs, device = published_costs(quantiles, mean, std)(np.random.default_rng(0), 100_000)
    assert device is None
    assert np.percentile(costs, [50, 75, 90, 100]) * 1e3 == pytest.approx(quantiles[1:], rel=0.02)
    assert quantiles[0] <= costs.min() * 1e3 <= quantiles[0] + 0.05 * mean
    assert costs.mean() * 1e3 == pytest.approx(mean, rel=0.02)
    assert costs.std() * 1e3 == pytest.approx(std, rel=0.06)


def test_no_prediction_knows_of_a_surprise() -> None:
    scenario = SCENARIOS["surprise-cut"]
    work, calm = (one.work(4, 0.3) for one in (scenario, replace(scenario, surprise=(0.0, 1.0, 1.0))))
    assert np.array_equal(work.predicted_cpu, calm.predicted_cpu)
    assert np.array_equal(work.plans(7), calm.plans(7))
    slow = work.cpu > 1.5 * calm.cpu
    assert 0.005 < slow.mean() < 0.02
    for one, other in ((work.cpu, calm.cpu), (work.cuts[0].cpu, calm.cuts[0].cpu)):
        assert np.allclose(one[slow], 30 * other[slow]) and np.array_equal(one[~slow], other[~slow])
