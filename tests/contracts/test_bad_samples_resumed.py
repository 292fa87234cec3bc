"""What was left out counts against ``max_failures`` after a resume, too."""

from __future__ import annotations

from typing import Any

import pytest

from minato_gpu import DataLoader
from minato_gpu.faults.failures import FailurePolicy, TooManyFailures
from minato_gpu.lanes.base import failure
from minato_gpu.observe.telemetry import Telemetry
from minato_gpu.sampling.delivered import DeliveredPositions
from tests.contracts.broken import broken, numbers, rarely_broken
from tests.contracts.datasets import Made
from tests.contracts.modes import MINATO, Mode
from tests.contracts.resuming import through_json
from tests.support.raising import error_of


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_the_budget_counts_on_after_a_resume(mode: Mode, workers: int) -> None:
    """Three may be left out, and the fourth comes after the resume: with its count it is one too many."""

    def make() -> Any:
        return mode.loader(
            Made(100, rarely_broken), 4, num_workers=workers, on_error="skip", max_failures=3, shuffle=False
        )

    loader = make()
    iterator = iter(loader)
    while loader._session.progress is None or loader._session.progress.source.delivered.failed < 3:
        next(iterator)
    state = through_json(loader.state_dict())
    assert state["progress"]["failed"] == 3
    assert loader.state_dict(ahead=loader._session.progress.source.delivered.batches)["progress"].get("failed") is None
    resumed = make()
    resumed.load_state_dict(state)
    text = str(error_of(TooManyFailures, list, resumed))
    assert "4 samples failed in this epoch, max_failures=3" in text
    del state["progress"]["failed"]  # as states were before they told it
    resumed = make()
    resumed.load_state_dict(state)
    assert len(numbers(resumed)) + 3 + 1 <= 100
    assert len(numbers(_lenient(make()))) == 96, "the next epoch counts from nothing"


def _lenient(loader: Any) -> Any:
    loader.max_failures = None
    return loader


@pytest.mark.parametrize("workers", [0, 1])
def test_the_budget_counts_what_a_caught_error_had_left_out(workers: int) -> None:
    def make() -> Any:
        return DataLoader(Made(40, broken), 4, num_workers=workers, on_error="skip", max_failures=1)

    loader = make()
    iterator = iter(loader)
    next(iterator)
    error_of(TooManyFailures, next, iterator)  # 5 and 6 are in one batch
    assert "failed" not in loader.state_dict()["progress"], "the consumer has not gone on: the batch comes once more"
    next(iterator)
    assert loader.state_dict()["progress"]["failed"] == 2


def test_a_share_of_what_has_been_seen_counts_what_was_seen_before() -> None:
    """Of an unknown number: 4 of 100 before, and now the fifth of 101 and the sixth of 102."""
    bad = failure(ValueError("broken"), "here")
    policy = FailurePolicy("skip", 0.05, None, Telemetry(0.0), DeliveredPositions(25, 100, failed=4))
    policy.take([bad], 0)
    assert policy.count == 5
    with pytest.raises(TooManyFailures, match="6 samples failed"):
        policy.take([bad], 0)
