"""The README's tables are what the recorded results say."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.readme import COLUMNS, described, main, markdown, recorded

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "cpu-2-cores"


@pytest.mark.parametrize("name", COLUMNS)
def test_readme_shows_the_recorded_results(name: str) -> None:
    document = recorded(RESULTS, name)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"<!-- {name} -->\n{described(document)}\n\n{markdown(name, document['rows'])}\n<!-- /{name} -->" in readme


def test_a_readme_without_the_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("nothing here\n")
    result = CliRunner().invoke(main, [str(RESULTS), "--readme", str(tmp_path / "README.md")])
    assert result.exit_code == 1 and "<!-- overhead -->" in result.output
