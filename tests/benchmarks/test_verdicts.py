"""The planted scripts are scripts, and the benchmark runs."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from benchmarks import verdicts
from minato_gpu.analysis.verdict import Case
from tests import programs


@pytest.mark.parametrize("name", verdicts.PLANTED)
def test_what_is_planted_is_a_script_and_a_verdict(name: str) -> None:
    planted = verdicts.PLANTED[name]
    compile(verdicts.HEAD + planted.body, name, "exec")
    assert planted.case in get_args(Case)


def test_there_are_twelve() -> None:
    assert len(verdicts.PLANTED) == 12


def test_it_compares() -> None:
    (row,) = json.loads(programs.run("benchmarks.verdicts", "--quick", "--case", "step-bound", "--json", "-"))["rows"]
    assert row["planted"] == row["expected"] == "step-bound"
    assert row["right"] == (row["verdict"] == "step-bound") and row["sentence"]
