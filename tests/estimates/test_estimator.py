"""The engine's estimates: features meet what was measured, whichever epoch has begun meanwhile."""

from __future__ import annotations

import numpy as np

from minato_gpu.estimates.estimator import Estimator, Observed
from minato_gpu.samples import TicketId
from minato_gpu.scheduling.costs import CostModel
from tests.support.tickets import span

_COUNT = 400


def _costs() -> tuple[list[int], list[tuple[float, ...] | None], list[float]]:
    """Keys, one feature each, and costs that the feature explains but for 5 percent."""
    rng = np.random.default_rng(0)
    features = np.exp(rng.normal(size=_COUNT))
    seconds = 4e-3 * features * np.exp(rng.normal(scale=0.05, size=_COUNT))
    return list(range(_COUNT)), [(float(value),) for value in features], seconds.tolist()


def _run(estimator: Estimator, *, epoch_begins_at: int) -> float:
    keys, features, seconds = _costs()
    estimator.begin_run()
    for at in range(0, _COUNT, 8):
        part = slice(at, at + 8)
        estimator.of_features([*map(TicketId, keys[part])], keys[part], features[part])
    for at in range(0, _COUNT, 8):
        if at == epoch_begins_at:
            estimator.begin_epoch()
        part = slice(at, at + 8)
        estimator.measured("cpu", Observed(keys[part], [*map(TicketId, keys[part])], seconds[part], sum(seconds[part])))
    report = estimator.report()
    assert isinstance(report["log_sigma"], float)
    return report["log_sigma"]


def test_an_epoch_that_begins_keeps_the_features_of_what_was_admitted_before() -> None:
    """Epochs overlap: tickets of the next one are inspected while the last one is delivered."""
    assert _run(Estimator(CostModel(("cpu",), features=1), ("cpu",)), epoch_begins_at=200) < 0.1


def test_tickets_nobody_measured_leave_nothing_behind() -> None:
    estimator = Estimator(CostModel(("cpu",), features=1), ("cpu",))
    keys, features, _ = _costs()
    estimator.of_features([*map(TicketId, keys)], keys, features)
    estimator.not_measured([span(0, 100), span(100, _COUNT)])
    assert not estimator._features


def test_numbers_of_an_earlier_run_mean_nothing_to_the_next() -> None:
    estimator = Estimator(CostModel(("cpu",), features=1), ("cpu",))
    estimator.of_features([TicketId(0)], [0], [(5.0,)])
    estimator.begin_run()
    estimator.measured("cpu", Observed([0], [TicketId(0)], [1e-3], 1e-3))
    assert estimator.report()["samples"] == 0  # without features or history nothing had been predicted
