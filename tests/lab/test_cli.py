"""The command line: what each command says and with what code it ends."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from minato_gpu.lab import parity
from minato_gpu.lab.cli import main
from minato_gpu.lab.simulation import cluster, comparison
from tests.contracts.cached import DISK, SAMPLES, Files, loader_of, rows, sums, without_draws, write_files
from tests.support import programs

PHOTOGRAPHS = 35  # of the example
ROW: dict[str, Any] = {
    "stage": "flip",
    "implementation": "dali on cpu",
    "samples": 2,
    "max_deviation": 1.0,
    "mean_deviation": 0.5,
    "limit_max": 2.0,
    "limit_mean": 0.25,
    "problem": "",
    "passed": True,
}


def _run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == code, result.output
    return result


def _report(monkeypatch: pytest.MonkeyPatch, *rows: dict[str, Any]) -> None:
    monkeypatch.setattr(parity, "run_check", lambda *_: parity.ParityReport(list(rows), ["path 'a.jpg': broken"]))


def test_help_and_version_load_nothing_heavy() -> None:
    code = (
        "import sys; from minato_gpu.lab import cli; cli.main(['--help'], standalone_mode=False); "
        "sys.exit(bool({'cv2', 'matplotlib', 'rich', 'nvidia.dali'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in ("demo", "check", "analyze", "simulate"))


def test_check_passes_on_the_example_pipeline() -> None:
    result = _run("check", "pipelines.image_classification", "--json", "-")
    document = json.loads(result.stdout)
    assert [row["stage"] for row in document["rows"]] == [
        *("decode", "resize", "flip", "normalise"),
        *("split 2", "split 3", "split 4", "split 5"),
    ]
    for row in document["rows"]:
        assert row["passed"], row
        assert row["samples"] == parity.DRAWS * PHOTOGRAPHS
        # What the issue asks for; normalised floats are off by their channel's share of a level.
        assert row["limit_max"] <= 2
        assert row["limit_mean"] <= 0.25
    assert document["settings"]["module"] == "pipelines.image_classification"
    assert "within its tolerance" in result.stderr


def test_check_fails_above_the_tolerance(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _report(monkeypatch, ROW, ROW | {"stage": "resize", "passed": False})
    result = _run("check", "pipelines.image_classification", "--json", str(tmp_path / "c.json"), code=1)
    assert "deviates by more than its tolerance" in result.output
    assert "left out: path 'a.jpg': broken" in result.output
    assert [row["passed"] for row in json.loads((tmp_path / "c.json").read_text())["rows"]] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_module"], "no module named no_such_module"),
        (["json"], "defines no pipeline"),
        (["pipelines.image_classification", "--device", "tpu-ish"], "is no device"),
        (["pipelines.image_classification", "--device", "mps"], "no pipeline runs on 'mps'"),
        (["pipelines.image_classification", "--device", "cuda:77"], "there is no 'cuda:77'"),
        (["pipelines.image_classification", "--data", "/no/such/folder"], "does not exist"),
    ],
)
def test_check_refuses_wrong_arguments(arguments: list[str], message: str) -> None:
    assert message in _run("check", *arguments, code=2).output


def test_simulate_writes_a_row_for_each_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], int]] = []

    def run(names: list[str], seeds: int) -> list[dict[str, Any]]:
        asked.append((names, seeds))
        return [{"scenario": name, "of_bound": 0.9} for name in names]

    monkeypatch.setattr(comparison, "run", run)
    document = json.loads(_run("simulate", "hybrid", "tail", "--seeds", "2", "--json", "-").stdout)
    assert asked == [(["hybrid", "tail"], 2)]
    assert [row["scenario"] for row in document["rows"]] == ["hybrid", "tail"]
    assert document["settings"]["scenarios"] == ["hybrid", "tail"]
    assert document["settings"]["seeds"] == 2
    _run("simulate")
    assert asked[-1] == (list(comparison.SCENARIOS), 10)
    monkeypatch.setattr(cluster, "run", lambda: [{"gbit_s": 25.0, "of_bound": 0.9}])
    assert json.loads(_run("simulate", "cluster", "--json", "-").stdout)["rows"][0]["gbit_s"] == 25.0


def test_simulate_lists_its_scenarios_and_refuses_others() -> None:
    listed = _run("simulate", "--list").output
    assert all(name in listed for name in comparison.SCENARIOS)
    assert "no scenario nonsense; there are hybrid" in _run("simulate", "nonsense", code=2).output


def test_an_error_is_one_line_unless_a_traceback_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(parity, "run_check", fail)
    assert (
        "Error: RuntimeError: the device is on fire" in _run("check", "pipelines.image_classification", code=1).output
    )
    raised = CliRunner().invoke(main, ["--traceback", "check", "pipelines.image_classification"]).exception
    assert isinstance(raised, RuntimeError)


@pytest.mark.parametrize("wrong", [["--epochs", "0"], ["--data", "/no/such/folder"], ["--workers", "0"]])
def test_demo_refuses_wrong_arguments(wrong: list[str]) -> None:
    assert "Invalid value" in _run("demo", *wrong, code=2).output


@pytest.mark.parametrize(
    "arguments",
    [
        ["analyze", "train.py", "--json"],
        ["analyze", "train.py", "--report"],
        ["check", "pipelines.image_classification", "--json"],
        ["simulate", "--json"],
        ["demo", "--out"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_written_at_the_end_is_said_at_once(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    *given, option = arguments
    said = _run(given[0], option, str(tmp_path / "file" / "figures"), *given[1:], code=2).output
    assert f"Invalid value for '{option}': " in said and "cannot be written: Not a directory" in " ".join(said.split())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# --- minato-gpu cache -------------------------------------------------------------------------------------------------


def _loader(folder: Path) -> Any:
    """A loader that keeps copies of its files on disk."""
    return loader_of(Files(write_files(folder / "files")), DISK, folder / "cache")


def _cache(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_run("cache", *arguments, "--json", "-").stdout)["rows"][0]
    return found


def test_a_cache_is_shown_and_emptied(tmp_path: Path) -> None:
    path, files = str(tmp_path / "cache"), tmp_path / "files"
    assert without_draws(sorted(rows(_loader(tmp_path)))) == sums(files)
    gc.collect()
    nbytes = sum(file.stat().st_size for file in files.iterdir())
    row = _cache(path)
    assert (row["entries"], row["content_bytes"]) == (SAMPLES, nbytes)
    assert nbytes <= row["disk_bytes"] <= DISK and 0 <= row["newest_s"] <= row["oldest_s"]
    assert f"{nbytes:,}" in _run("cache", path).output
    assert _cache(path, "--empty")["entries"] == 0
    assert "is no cache" in _run("cache", path, code=1).output
    assert without_draws(sorted(rows(_loader(tmp_path)))) == sums(files) and _cache(path)["entries"] == SAMPLES


def test_a_cache_that_is_in_use_is_emptied_and_its_run_goes_on(tmp_path: Path) -> None:
    loader = _loader(tmp_path)
    batches = iter(loader)
    found = rows([next(batches)])
    said = programs.run("minato_gpu", "cache", str(tmp_path / "cache"), "--empty", "--json", "-")
    assert json.loads(said)["rows"][0]["in_use"] is True
    for each in (found + rows(batches), rows(loader)):
        assert without_draws(sorted(each)) == sums(tmp_path / "files")


def test_wrong_directories_of_caches_are_said(tmp_path: Path) -> None:
    assert "is no cache" in _run("cache", str(tmp_path), code=1).output
    assert "is no cache" in _run("cache", str(tmp_path), "--empty", code=1).output
    assert "does not exist" in _run("cache", str(tmp_path / "nothing"), code=2).output
