"""The planted scripts are scripts, and the benchmark runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from click.testing import CliRunner

from benchmarks import verdicts
from minato_gpu.analysis.verdict import Case
from minato_gpu.cli import main


@pytest.mark.parametrize("name", verdicts.PLANTED)
def test_what_is_planted_is_a_script_and_a_verdict(name: str) -> None:
    planted = verdicts.PLANTED[name]
    compile(verdicts.HEAD + planted.body, name, "exec")
    assert planted.case in get_args(Case)


def test_there_are_twelve() -> None:
    assert len(verdicts.PLANTED) == 12


def _here(command: list[str], **_: Any) -> SimpleNamespace:
    """The command in this process, which has what an interpreter would import already."""
    assert command[:3] == [sys.executable, "-m", "minato_gpu"]
    done = CliRunner().invoke(main, command[3:])
    return SimpleNamespace(returncode=done.exit_code, stdout=done.stdout, stderr=done.stderr)


@pytest.mark.usefixtures("forked")
def test_it_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("benchmarks.verdicts.subprocess.run", _here)
    done = CliRunner().invoke(verdicts.main, ["--quick", "--case", "step-bound", "--json", "out.json"])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(Path("out.json").read_text(encoding="utf-8"))["rows"]
    assert row["planted"] == row["expected"] == "step-bound"
    assert row["right"] == (row["verdict"] == "step-bound") and row["sentence"]
