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

_BLOCKS, _BLOCK = 8, 8


@pytest.mark.parametrize("block", range(_BLOCKS))
def test_nothing_is_lost(block: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, LOGGER.name)
    broken = {}
    for seed in range(block * _BLOCK, (block + 1) * _BLOCK):
        _, result = chaos(seed)
        if result.broken:
            broken[seed] = result.broken
    assert not broken


def test_the_seeds_of_the_suite_try_everything() -> None:
    plans = [Plan(seed) for seed in range(_BLOCKS * _BLOCK)]
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
        [sys.executable, "-m", "benchmarks.chaos", "--seeds", "2", "--first-seed", "30", "--json", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "runs with anything lost" in done.stdout and "killed from outside" in done.stdout
    document = json.loads(path.read_text())
    assert {"machine", "versions", "settings", "rows"} <= set(document)
    assert [row["seed"] for row in document["rows"]] == [30, 31]
    assert document["settings"]["runs_with_losses"] == 0
