"""The tables of README.md and of the pages beside it are what the recorded results say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import accuracy_page, gpu_page
from benchmarks.compare import plot
from benchmarks.readme import COLUMNS, PAGES, block, gpu_block, main, recorded

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "cpu-2-cores"
SESSIONS = [
    ROOT / "benchmarks" / "results" / "nvidia-h200" / f"2026-11-27{more}.json" for more in ("", "-2", "-3", "-4")
]


@pytest.mark.parametrize(("page", "name"), [(page, name) for page, names in PAGES.items() for name in names])
def test_pages_show_the_recorded_results(page: str, name: str) -> None:
    document = recorded(RESULTS, name)
    text = (ROOT / page).read_text(encoding="utf-8")
    assert f"<!-- {name} -->\n{block(name, document)}\n<!-- /{name} -->" in text


@pytest.mark.parametrize(("page", "name"), [(page, name) for page, names in gpu_page.PAGES.items() for name in names])
def test_pages_show_the_recorded_gpu_sessions(page: str, name: str) -> None:
    documents = [json.loads(session.read_text(encoding="utf-8")) for session in SESSIONS]
    assert f"<!-- {name} -->\n{gpu_block(name, documents)}\n<!-- /{name} -->" in (ROOT / page).read_text(
        encoding="utf-8"
    )


def test_all_recorded_gpu_sessions_are_shown() -> None:
    assert sorted(SESSIONS) == sorted(SESSIONS[0].parent.glob("*.json"))
    page = (ROOT / "benchmarks" / "MEASUREMENTS.md").read_text(encoding="utf-8")
    assert all(f"results/nvidia-h200/{session.name}" in page for session in SESSIONS)


def test_sessions_fill_their_tables_alone(tmp_path: Path) -> None:
    for page, names in gpu_page.PAGES.items():
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / page).write_text("".join(f"<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in names))
    sessions = [word for session in SESSIONS for word in ("--session", str(session))]
    result = CliRunner().invoke(main, [*sessions, "--root", str(tmp_path)])
    assert result.exit_code == 0, result.output
    filled = (tmp_path / "benchmarks" / "MEASUREMENTS.md").read_text()
    assert "\nold\n" not in filled and "H200" in filled
    assert filled.count("| this loader, CPU lane | ") == 3, "one for each session that has measured it"
    assert filled.count("| decoded | ") == 1, "the others have not asked"


def test_a_check_without_an_answer_says_why() -> None:
    rows = [
        {"case": "checks", "name": "a", "holds": True, "means": "nothing to do", "figure_s": 0.0123, "seen": False},
        {"case": "checks", "name": "b", "error": "one\nended by SIGABRT"},
        {"case": "checks", "name": "c", "missing": "no time left"},
    ]
    lines = gpu_page.table("gpu_checks", {"rows": rows}).splitlines()
    assert lines[2:] == [
        "| a | yes | figure_s 0.012, seen no |",
        "| b | not known: ended by SIGABRT |  |",
        "| c | not known: no time left |  |",
    ]


def test_every_table_has_a_page() -> None:
    assert sorted(name for names in PAGES.values() for name in names) == sorted(COLUMNS)


def test_a_page_without_the_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("nothing here\n")
    result = CliRunner().invoke(main, [str(RESULTS), "--root", str(tmp_path)])
    assert result.exit_code == 1 and "README.md has no place marked <!-- swap -->" in result.output


def test_the_comparison_page_shows_the_recorded_results() -> None:
    page = (ROOT / "benchmarks" / "COMPARISON.md").read_text(encoding="utf-8")
    files = sorted(RESULTS.glob("compare_*.json"))
    assert len(files) == 4
    for file in files:
        picture = file.with_suffix(".png")
        assert picture.stat().st_size > 10_000
        section = plot.section(json.loads(file.read_text(encoding="utf-8")), f"results/cpu-2-cores/{picture.name}")
        assert section in page


def test_the_accuracy_page_shows_the_recorded_results() -> None:
    page = (ROOT / "benchmarks" / "ACCURACY.md").read_text(encoding="utf-8")
    document = json.loads((RESULTS / "accuracy.json").read_text(encoding="utf-8"))
    assert page == accuracy_page.page(document, "results/cpu-2-cores/accuracy.png")
    assert (RESULTS / "accuracy.png").stat().st_size > 10_000


def test_pages_are_made_by_their_commands(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    for file in ("accuracy.json", "compare_segmentation_3d.json"):
        (folder / file).write_bytes((RESULTS / file).read_bytes())
    runs = (
        (accuracy_page.main, folder / "accuracy.json", "results/accuracy.png"),
        (plot.main, folder, "results/compare_segmentation_3d.png"),
    )
    for command, source, picture in runs:
        out = tmp_path / "PAGE.md"
        result = CliRunner().invoke(command, [str(source), "--out", str(out)])
        assert result.exit_code == 0, result.output
        assert f"]({picture})" in out.read_text(encoding="utf-8") and (tmp_path / picture).exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert CliRunner().invoke(plot.main, [str(empty)]).exit_code == 2
