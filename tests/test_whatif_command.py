"""``minato-gpu whatif``: rows of what is asked, and a line for what makes no sense."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from minato_gpu.analysis import questions
from minato_gpu.cli import main
from tests.analysis.conftest import a_profile


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file with a small profile."""
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(asdict(a_profile(samples=32))))
    return path


def rows(*arguments: str) -> list[dict[str, Any]]:
    """Of the document on standard output."""
    done = CliRunner().invoke(main, ["whatif", *arguments, "--json", "-"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return found


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """One: for what is asked, not how sure the answers are."""
    monkeypatch.setattr(questions, "answer", partial(questions.answer, draws=1))


@pytest.mark.usefixtures("few_draws")
def test_the_usual_questions(saved: Path) -> None:
    found = rows(str(saved))
    assert {"workers", "step, times", "batch size", "loader"} <= {row["question"] for row in found}
    assert all(row["epoch_s"] > 0 for row in found)


@pytest.mark.usefixtures("few_draws")
def test_a_range_is_a_curve_and_one_value_holds_for_all(saved: Path) -> None:
    found = rows(str(saved), "--workers", "1-4", "--step-ms", "0.5")
    assert [(row["question"], row["setting"]) for row in found] == [
        ("as measured", ""),
        ("workers", "1"),
        ("workers", "2"),
        ("workers", "4"),
    ]
    assert found[3]["epoch_s"] < found[2]["epoch_s"] < found[1]["epoch_s"]
    slow = rows(str(saved), "--cache", "0.5", "--rate-mb", "1", "--latency-ms", "20", "--policy", "lru")
    assert slow[1]["setting"] == "cache 0.5, rate mb 1, latency ms 20, lru" and slow[1]["epoch_s"] > slow[0]["epoch_s"]


def test_it_is_shown_as_a_table(saved: Path) -> None:
    done = CliRunner().invoke(main, ["whatif", str(saved), "--loader", "torch"])
    assert done.exit_code == 0, done.output
    assert "faster" in done.output and "torch" in done.output


def test_one_of_several_ranks(tmp_path: Path) -> None:
    path = tmp_path / "ranks.json"
    profiles = [a_profile(samples=32, rank=rank, ranks=2, step_s=(0.1 * (1 + rank),)) for rank in range(2)]
    ranks = [asdict(profile) for profile in profiles]
    path.write_text(json.dumps({"profiles": ranks}))
    first, second = (rows(str(path), "--rank", str(rank), "--workers", "4")[0]["epoch_s"] for rank in range(2))
    assert second > 1.8 * first
    done = CliRunner().invoke(main, ["whatif", str(path), "--rank", "2"])
    assert done.exit_code == 1 and "no rank 2" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers", "none"], "no number"),
        (["--workers", "0"], "makes no sense"),
        (["--policy", "lru"], "give --cache too"),
        (["--loader", "torch", "--cache", "0.5"], "cache in memory"),
    ],
)
def test_what_makes_no_sense_is_said_in_a_line(saved: Path, arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(main, ["whatif", str(saved), *arguments])
    assert done.exit_code in (1, 2) and said in done.output and "Traceback" not in done.output


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"loader": "torch"}', "\0", '"x"', "[1]"])
def test_another_file_is_no_profile(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    done = CliRunner().invoke(main, ["whatif", str(path)])
    assert done.exit_code == 1 and "no profile" in done.output
