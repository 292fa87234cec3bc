"""Each benchmark runs at toy size; its document has the keys that are promised and its figures make sense.

Most run on request: what they measure is benchmarks' own, and no promise of the package.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args

import pytest
from click.testing import CliRunner

from benchmarks import verdicts
from minato_gpu.lab.analysis.preparation import Case
from minato_gpu.lab.cli import main
from tests.support import programs


class Toy(NamedTuple):
    """``rows``: at least so many. ``positive``: keys that rows have, of figures above zero; ``names``: what the rows
    are, by the key that says it."""

    command: str
    positive: str
    rows: int = 1
    names: tuple[str, set[Any]] = ("", set())


TOYS = (
    Toy("caches", "hit_rate belady of_belady", 84),
    Toy("cluster --case '12 KB, 4' --case killed", "samples_per_s of_bound main_us recovery_s", 3),
    Toy(
        "compare image_classification --loader 'pytorch in order' --loader 'minato_gpu in order'",
        *("samples_per_s efficiency cpu_s_per_sample peak_pss_bytes", 2),
    ),
    Toy("coordl", "found paper", 16),
    Toy("hits", "hit_us bare_us ratio", 3, ("tier", {"memory", "disk"})),
    Toy("paired --class arrays", "samples_per_s cpu_us batch_ms penalty", 4),
    Toy("peer_epochs", "times_read remote expected", 10, ("hosts", {2, 3, 4})),
    Toy("saves", "save_p50_us save_cpu_p99_us own_bytes batch_us saved_batch_us", 16, ("window", {256, 4096})),
    Toy(
        "scaling --workers 2 --cost 1 --loader 'pytorch in order' --loader minato_gpu",
        *("samples_per_s of_bound first_batch_s main_us_per_sample workers_us_per_sample ratio_to_peer", 3),
    ),
    Toy("seneca", "paper_s mean_s time_s of_mean", 15),
    Toy("swap", "epoch_s wait_p99_ms first_epoch_s", 4),
    Toy("storage --loader pytorch", "of_bound samples_per_s", 2),
    Toy("tails --case 'rare' --loader 'in order'", "efficiency elapsed_s first_batch_s peak_rss_bytes bound_s", 2),
    Toy("tails --case 'scattered, 81' --loader bounded", "efficiency elapsed_s first_batch_s", 1),
    Toy("tails --case 'short epochs, 105' --loader 'pytorch in order'", "efficiency elapsed_s", 1),
    Toy("node", "of_bound", 8, ("loader", {"pytorch", "minato, host"})),
)


@pytest.mark.on_request  # see the module's head
@pytest.mark.timeout(240)
@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.command)
def test_a_run_at_toy_size(toy: Toy) -> None:
    name, *rest = shlex.split(toy.command)
    document: dict[str, Any] = json.loads(programs.run(f"benchmarks.{name}", "--quick", "--json", "-", *rest))
    assert {"date", "machine", "versions", "settings", "rows"} <= set(document)
    assert document["machine"]["cores"] >= 1
    assert {"torch", "spdl", "torchdata"} <= set(document["versions"])
    assert document["settings"]["quick"] is True
    rows = document["rows"]
    assert len(rows) >= toy.rows and not any("failed" in row or isinstance(row.get("error"), str) for row in rows)
    for key in toy.positive.split():
        found = [row[key] for row in rows if row.get(key) is not None]
        assert found and all(math.isfinite(each) and each >= 0 for each in found) and any(found), key
    name, values = toy.names
    assert {row.get(name) for row in rows} >= values


# --- planted causes -------------------------------------------------------------------------------------------------


def test_what_is_planted_is_twelve_scripts_and_verdicts() -> None:
    assert len(verdicts.PLANTED) == 12
    for name, planted in verdicts.PLANTED.items():
        compile(verdicts.HEAD + planted.body, name, "exec")
        assert planted.case in get_args(Case)


def _here(command: list[str], **_: Any) -> SimpleNamespace:
    """The command in this process, which has what an interpreter would import already."""
    assert command[:3] == [sys.executable, "-m", "minato_gpu"]
    done = CliRunner().invoke(main, command[3:])
    return SimpleNamespace(returncode=done.exit_code, stdout=done.stdout, stderr=done.stderr)


@pytest.mark.usefixtures("forked")
def test_verdicts_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("benchmarks.verdicts.subprocess.run", _here)
    done = CliRunner().invoke(verdicts.main, ["--quick", "--case", "step-bound", "--json", "out.json"])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(Path("out.json").read_text(encoding="utf-8"))["rows"]
    assert row["planted"] == row["expected"] == "step-bound"
    assert row["right"] == (row["verdict"] == "step-bound") and row["sentence"]
