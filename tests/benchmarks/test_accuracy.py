"""The accuracy benchmark: its test of chance sees clustered slow samples, and it runs at toy size."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.accuracy import LOADERS, chance, difference
from tests.support import programs

_SLOW = np.arange(1200) < 120


def _counts(orders: list[np.ndarray]) -> list[list[int]]:
    return [[int(_SLOW[order[at : at + 32]].sum()) for at in range(0, 1200, 32)] for order in orders]


def test_shuffled_samples_are_as_chance_has_them() -> None:
    rng = np.random.default_rng(0)
    found = chance(_counts([rng.permutation(1200) for _ in range(20)]), _SLOW)
    assert found["p_value"] is not None and found["p_value"] > 0.01
    assert found["slow_share_first_half"] == pytest.approx(0.1, abs=0.01)


def test_slow_samples_that_come_together_are_seen() -> None:
    """Every epoch in order but for the slow samples, which all come last."""
    rng = np.random.default_rng(0)
    orders = [rng.permutation(1200) for _ in range(20)]
    found = chance(_counts([order[np.argsort(_SLOW[order], kind="stable")] for order in orders]), _SLOW)
    assert found["p_value"] is not None and found["p_value"] < 1e-6
    assert found["slow_share_first_half"] == 0.0


def test_the_difference_is_taken_seed_by_seed() -> None:
    found = difference([0.90, 0.95, 0.85], [0.89, 0.94, 0.84])
    assert list(found.values()) == pytest.approx([0.01, 0.01, 0.01])
    wide = difference([0.9, 0.8], [0.8, 0.9])
    assert wide["to_pytorch"] == pytest.approx(0) and wide["to_pytorch_low"] < -1 < 1 < wide["to_pytorch_high"]


@pytest.mark.on_request  # fourteen seconds, of what is benchmarks' own
@pytest.mark.timeout(180)
def test_a_run_at_toy_size() -> None:
    rows = json.loads(programs.run("benchmarks.accuracy", "--quick", "--json", "-"))["rows"]
    assert [row["loader"] for row in rows] == list(LOADERS)
    assert all(0 < row["accuracy"] <= 1 and len(row["accuracies"]) == 2 for row in rows)
