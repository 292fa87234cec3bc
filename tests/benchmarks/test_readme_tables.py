"""The tables of README.md and of the pages beside it are what the recorded results say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.readme import GPU_PAGE, GPU_TABLES, PAGES, block, gpu_block, main, recorded

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


@pytest.mark.parametrize("name", GPU_TABLES)
def test_the_page_shows_the_recorded_gpu_sessions(name: str) -> None:
    documents = [json.loads(session.read_text(encoding="utf-8")) for session in SESSIONS]
    text = (ROOT / GPU_PAGE).read_text(encoding="utf-8")
    assert f"<!-- {name} -->\n{gpu_block(name, documents)}\n<!-- /{name} -->" in text


def test_all_recorded_gpu_sessions_are_shown() -> None:
    assert sorted(SESSIONS) == sorted(SESSIONS[0].parent.glob("*.json"))
    page = (ROOT / "benchmarks" / "MEASUREMENTS.md").read_text(encoding="utf-8")
    assert all(f"results/nvidia-h200/{session.name}" in page for session in SESSIONS)


def test_sessions_fill_their_tables_alone(tmp_path: Path) -> None:
    page = tmp_path / GPU_PAGE
    page.parent.mkdir()
    page.write_text("".join(f"<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in GPU_TABLES))
    sessions = [word for session in SESSIONS for word in ("--session", str(session))]
    result = CliRunner().invoke(main, [*sessions, "--root", str(tmp_path)])
    assert result.exit_code == 0, result.output
    filled = page.read_text()
    assert "\nold\n" not in filled and "H200" in filled
    assert filled.count("| this loader, CPU lane | ") == 3, "one for each session that has measured it"
    assert filled.count("| decoded | ") == 1, "the others have not asked"


def test_every_document_has_a_table() -> None:
    """But those of which the page tells in words."""
    told = {"busy", "busy_step", "chaos"}
    shown = {name for names in PAGES.values() for name in names} - {"pairs", "compare"}
    assert {path.stem for path in RESULTS.glob("*.json")} == shown | told


def test_readme_shows_pairs_that_are_decided() -> None:
    """Those with two workers: the page has all of them."""
    ours = {"case": "arrays, 2 workers", "loader": "minato_gpu", "workers": 2, "penalty": 0.02}
    rows = [
        {**ours, "loader": peer, "penalty": 0.1, "ratio": 1.2, "ratio_low": low, "ratio_high": high}
        for peer, low, high in (("PyTorch", 1.1, 1.3), ("SPDL", 0.9, 1.4), ("torchdata", 0.9, None))
    ]
    rows.append({**rows[0], "case": "arrays, 4 workers", "workers": 4})
    head = {"date": "2026-11-27", "machine": {"cores": 2, "processor": "one", "gpus": []}, "versions": {}}
    said = block("pairs", {**head, "rows": [ours, *rows]})
    assert "| arrays, 2 workers | PyTorch | 1.20 (1.10 to 1.30) | 10% | 2% |" in said
    assert "SPDL" not in said and "4 workers" not in said
    assert said.endswith("Of 3 comparisons 2 are not shown: their interval includes 1.")
