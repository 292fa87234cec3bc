"""Chaos from a seed: whatever is done to the loader, P1 to P7 hold. ``python -m benchmarks.chaos`` runs more seeds."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos import Result, chaos
from benchmarks.chaos_plan import FAULTS, Plan
from minato_gpu.notices import LOGGER

# Of the first 64 those that together have every fault, once and always, in every content, order and kind of budget in
# which the others have it; the cheapest such.
_SEEDS = (0, 2, 3, 4, 5, 11, 13, 22, 23, 26, 27, 31, 32, 38, 43, 46, 48, 49, 53, 55, 59, 61, 62, 63)


@pytest.mark.parametrize("seed", _SEEDS)
def test_nothing_is_lost(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, LOGGER.name)
    _, result = chaos(seed)
    assert not result.broken


def test_the_seeds_of_the_suite_try_everything() -> None:
    plans = [Plan(seed) for seed in _SEEDS]
    kinds = {kind for plan in plans for kind, _ in plan.faults.values()}
    kinds |= {"killed from outside" for plan in plans if plan.murder} | {"resume" for plan in plans if plan.steps}
    assert kinds == set(FAULTS)


@pytest.mark.parametrize("loss", ["missing", "twice", "late", "altered", "uncounted"])
def test_a_loss_is_seen(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks can fail."""
    from benchmarks import chaos as module

    run = module._run

    def losing(plan: Plan, dataset: object, result: Result) -> None:
        run(plan, dataset, result)  # type: ignore[arg-type]
        first = result.received[0]
        if loss == "missing":
            result.received.pop(0)
        elif loss == "twice":
            result.received.append(first)
        elif loss == "late":
            result.lateness = plan.lateness + 1
        elif loss == "altered":
            result.received[0] = (first[0], 0.5, *first[2:])
        else:
            result.totals["samples_failed"] += 1

    monkeypatch.setattr(module, "_run", losing)
    promise = {"missing": "P1", "twice": "P1", "late": "P3", "altered": "P2", "uncounted": "P6"}[loss]
    _, result = chaos(4)
    assert promise in {words[:2] for words in result.broken}


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "chaos.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.chaos", "--seeds", "2", "--first-seed", "31", "--json", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "runs with anything lost" in done.stdout and "killed from outside" in done.stdout
    document = json.loads(path.read_text())
    assert {"machine", "versions", "settings", "rows"} <= set(document)
    assert [row["seed"] for row in document["rows"]] == [31, 32]
    assert document["settings"]["runs_with_losses"] == 0
