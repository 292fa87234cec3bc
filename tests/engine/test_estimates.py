"""Costs of parts and rests: learned each by itself, guessed until then, and offered only where a graph is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from minato_gpu.estimates import cuts
from minato_gpu.estimates.cuts import CutEstimator, part_names
from minato_gpu.estimates.estimator import Estimator, Observed
from minato_gpu.lanes.base import Part
from minato_gpu.lanes.contract import Offers
from minato_gpu.pipeline.pipeline import CupyFunction, Field, Pipeline, Stage
from minato_gpu.samples import TicketId
from minato_gpu.scheduling.costs import CostModel
from minato_gpu.scheduling.plans import Plan

X = Field(np.float32, (1000,))


def _nothing(*_: Any) -> Any:
    raise AssertionError("never run")


def _stage(name: str) -> Stage:
    return Stage(name, ("x",), {"x": X}, cpu=_nothing, device=CupyFunction(_nothing))


PIPELINE = Pipeline(
    (Stage("read", ("n",), {"x": X}, cpu=_nothing), _stage("a"), _stage("b")), outputs=("x",), name="tests"
)
CUT = 2


def estimator(built: bool = True) -> CutEstimator:
    model = CostModel(part_names(PIPELINE), features=1)
    made = CutEstimator(model, ("cpu", "device"), PIPELINE, ["device"])
    made.offered("device", Offers(frozenset([CUT]) if built else frozenset()))
    return made


def teach(
    made: CutEstimator, lane: str, first: int, each: tuple[float, ...], nbytes: int = -1, spent: float = 0.0
) -> None:
    """Two hundred samples of which the parts took ``each``, and all of it ``spent``."""
    keys = list(range(200))
    for key in keys:
        made._features[TicketId(key)] = (1.0 + key % 7,)
    seconds = [spent or sum(each)] * 200
    serials = [*map(TicketId, keys)]
    parts: list[Part | None] = [(first, each)] * 200
    made.measured(lane, Observed(keys, serials, seconds, sum(seconds), parts, [nbytes] * 200))


def ask(made: CutEstimator) -> tuple[float, float, Sequence[Plan]]:
    cpu, device, between = made.of_features([TicketId(900)], [900], [(3.0,)])
    return cpu[0], device[0], between[0]


def test_a_plan_costs_the_sum_of_its_parts_and_a_rest_of_its_own() -> None:
    made = estimator()
    teach(made, "cpu", 1, (6e-3, 2e-3))
    teach(made, "device", 1, (4e-3,))
    teach(made, "device", CUT, (5e-4,))
    cpu, device, (plan,) = ask(made)
    assert [cpu, device] == pytest.approx([8e-3, 4e-3], rel=0.02)
    assert list(plan) == pytest.approx([CUT, 6e-3, 5e-4, 0.0], rel=0.02)


def test_a_rest_that_was_never_measured_is_guessed_from_the_parts_and_the_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuts, "_USUAL_RATE", 1e6)
    made = estimator()
    teach(made, "cpu", 1, (6e-3, 2e-3))
    teach(made, "device", 1, (4e-3,))
    assert ask(made)[2][0].device == pytest.approx(4e-3 / 4 + 4000 / 1e6, rel=0.02)
    teach(made, "cpu", 1, (6e-3,), nbytes=1000, spent=7e-3)  # handed over: fewer bytes than declared, laid down in 1 ms
    plan = ask(made)[2][0]
    assert plan.device == pytest.approx(4e-3 / 4 + 1000 / 1e6, rel=0.02)
    assert plan.cpu == pytest.approx(7e-3, rel=0.02)


def test_nothing_is_offered_before_both_lanes_are_known_or_a_graph_is_built() -> None:
    made = estimator()
    assert ask(made)[2] == ()
    teach(made, "cpu", 1, (6e-3, 2e-3))
    assert ask(made)[2] == ()
    other = estimator(built=False)
    teach(other, "cpu", 1, (6e-3, 2e-3))
    teach(other, "device", 1, (4e-3,))
    assert ask(other)[2] == ()


def test_numbers_of_an_earlier_run_mean_nothing_to_the_next() -> None:
    estimator = Estimator(CostModel(("cpu",), features=1), ("cpu",))
    estimator.of_features([TicketId(0)], [0], [(5.0,)])
    estimator.begin_run()
    estimator.measured("cpu", Observed([0], [TicketId(0)], [1e-3], 1e-3))
    assert estimator.report()["samples"] == 0  # without features or history nothing had been predicted
