"""Chaos from a seed: whatever is done to the loader, P1 to P7 hold. ``python -m benchmarks.chaos`` runs more seeds."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from pathlib import Path
from typing import Any

import click
import pytest

from benchmarks.chaos import Result, chaos
from benchmarks.chaos_plan import FAULTS, STATEFUL, STREAMS, Plan
from benchmarks.chaos_record import record, summary
from minato_gpu.notices import LOGGER
from tests.support import programs

# Of the first 64 those that together have every fault, once and always, in every content, order and kind of budget in
# which the others have it; the cheapest such. And some that save and resume with the state of a sampler or stream.
_SEEDS = (
    *(0, 2, 3, 4, 5, 11, 13, 22, 23, 26, 27, 31, 32, 38, 43, 46, 48, 49, 53, 55, 59, 61, 62, 63),
    *(16, 19, 21, 29, 30, 47),
)


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
    assert {plan.sampling for plan in plans if plan.steps} >= {"repeats", "shuffled", *STATEFUL}
    assert {plan.stream for plan in plans if plan.steps} == {None, *STREAMS}
    assert {plan.epochs for plan in plans if plan.steps} == {1, 2, 3} and any(plan.persistent for plan in plans)


@pytest.mark.parametrize("loss", ["missing", "twice", "late", "altered", "uncounted"])
def test_a_loss_is_seen(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks can fail."""
    from benchmarks import chaos as module

    run = module._run

    def losing(plan: Plan, dataset: object, result: Result) -> None:
        run(plan, dataset, result)
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
    said = programs.run("benchmarks.chaos", "--seeds", "2", "--first-seed", "31", "--json", str(path))
    assert "runs with anything lost" in said and "killed from outside" in said
    document = json.loads(path.read_text())
    assert {"date", "machine", "versions", "settings", "rows"} <= set(document)
    assert [row["seed"] for row in document["rows"]] == [31, 32]
    assert document["settings"]["runs_with_losses"] == 0
    injected = document["settings"]["injected"]
    assert sum(injected.values()) == sum(sum(row["injected"].values()) for row in document["rows"]) > 0


def _process() -> dict[str, Any]:
    return {"pid": os.getpid(), "start_method": multiprocessing.get_start_method()}


def _row(seed: int) -> dict[str, Any]:
    return {"seed": seed, "injected": {"raise": 2}, "broken": [], "delivered": 3, **_process()}


def test_an_interrupted_command_goes_on(tmp_path: Path) -> None:
    """Runs that are there are not done again, and what an interrupt leaves is a whole document."""
    path, done = tmp_path / "chaos.json", list[int]()

    def run(seed: int) -> dict[str, Any]:
        if seed == 13 and 13 not in done:
            done.append(seed)
            raise KeyboardInterrupt
        done.append(seed)
        return _row(seed)

    with pytest.raises(KeyboardInterrupt):
        record(run, range(20), 1, path)
    assert [row["seed"] for row in json.loads(path.read_text())["rows"]] == list(range(13))
    rows = record(run, range(5, 25), 1, path)
    assert done == [*range(13), 13, *range(13, 25)] and sorted(rows) == list(range(25))
    document = json.loads(path.read_text())
    assert document["settings"]["seeds"] == 25 and document["settings"]["injected"]["raise"] == 50


def test_it_is_written_while_it_runs(tmp_path: Path) -> None:
    path, there = tmp_path / "chaos.json", list[int]()

    def run(seed: int) -> dict[str, Any]:
        there.append(len(json.loads(path.read_text())["rows"]) if path.exists() else 0)
        return _row(seed)

    record(run, range(25), 1, path)
    assert there == [0] * 10 + [10] * 10 + [20] * 5


@pytest.mark.on_request  # three seconds, of what is benchmarks' own
def test_several_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "chaos.json"
    rows = record(_row, range(6), 2, path)
    assert sorted(rows) == list(range(6)) and os.getpid() not in {row["pid"] for row in rows.values()}
    assert {row["start_method"] for row in rows.values()} == {"fork"}, "as where they run one by one"
    assert [row["seed"] for row in json.loads(path.read_text())["rows"]] == list(range(6))


@pytest.mark.parametrize("content", ["", "{}", '{"settings": {"sources": "others"}, "rows": []}'])
def test_what_is_not_gone_on_with(tmp_path: Path, content: str) -> None:
    path = tmp_path / "chaos.json"
    path.write_text(content)
    with pytest.raises(click.UsageError, match="give another path"):
        record(_row, range(2), 1, path)
    assert path.read_text() == content


def test_what_was_lost_is_printed() -> None:
    rows = {3: {**_row(3), "broken": ["P1: missing"]}, 4: _row(4)}
    lines = {line["fault"]: line for line in summary(rows)}
    assert lines["raise"]["injected"] == 4 and lines["runs with anything lost"]["lost"] == 1
    assert lines["delivered"]["counted"] == 6 and "seed 3: P1: missing" in lines
