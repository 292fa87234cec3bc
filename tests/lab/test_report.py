"""Tables of commands at several widths, of which no word and no number is broken; and the JSON document beside them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import UTC, date, datetime
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from benchmarks import report as benchmark_report
from minato_gpu.lab import report
from minato_gpu.lab.cli import main
from minato_gpu.lab.console import Column, column, number, show

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu-2-cores"
WIDTHS = (80, 120, 160)
RECORDED = {
    "benchmarks.compare.__main__": "compare_image_classification",
    "benchmarks.scaling.__main__": "scaling_named",
    "benchmarks.tails": "tails",
    "minato_gpu.lab.simulation.comparison": "simulation",
}


def printed(width: int, title: str, rows: Sequence[Any], keys: Sequence[str] | None) -> str:
    out = StringIO()
    show(Console(file=out, width=width), title, rows, keys)
    return out.getvalue()


def check(text: str, width: int, columns: Sequence[Column]) -> None:
    """Each word of each heading, and each number, is a word of the text, of which no line is too long."""
    assert max(map(len, text.splitlines())) <= width
    words = set(text.split())
    for each in columns:
        assert set(each.heading.split()) <= words
        if each.number:
            assert {word for cell in each.cells for word in cell.split()} <= words


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("module", RECORDED)
def test_recorded_results_fit(module: str, width: int) -> None:
    rows = json.loads((RESULTS / f"{RECORDED[module]}.json").read_text(encoding="utf-8"))["rows"]
    keys = getattr(import_module(module), "_SHOWN", None) or list(benchmark_report.columns(RECORDED[module]))
    case = [row for row in rows if row.get("case") == rows[0].get("case")]
    shown = [key for key in keys if any(row.get(key) is not None for row in case)]
    check(printed(width, "a title", case, keys), width, [column(key, [row.get(key) for row in case]) for key in shown])


@pytest.mark.parametrize("width", WIDTHS)
def test_commands_keep_to_the_width(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    listed = CliRunner().invoke(main, ["simulate", "--list"]).output
    assert "surprise-cut" in listed.split() and max(map(len, listed.splitlines())) <= width


@pytest.mark.parametrize(
    ("values", "cells"),
    [
        ([0.98765, 0.5], ["0.988", "0.500"]),
        ([0.02861, 0.0], ["0.0286", "0.0000"]),
        ([12345.6, 0.5], ["12,345.6", "0.5"]),
        ([math.nan, math.inf, 2.5], ["nan", "inf", "2.500"]),
        ([None, 12_345], ["-", "12,345"]),
        ([True, False], ["yes", "no"]),
    ],
)
def test_numbers_of_a_column_have_as_many_digits(values: list[Any], cells: list[str]) -> None:
    assert column("a_column", values).cells == cells


@pytest.mark.parametrize(
    ("value", "written"),
    [(1163.4, "1,163"), (2.5e6, "2,500,000"), (12.34, "12.3"), (9.999, "10"), (0.00001234, "0.0000123"), (8, "8")],
)
def test_a_number_by_itself_is_written_out(value: float, written: str) -> None:
    assert number(value) == written and number(-value) == f"-{written}"
    assert (number(0.0), number(math.nan), number(math.inf)) == ("0", "nan", "inf")
    assert column("a_column", ["none", value]).cells[0] == "none"


# --- the JSON document ------------------------------------------------------------------------------------------------


def test_the_document_has_its_five_keys_and_what_is_added() -> None:
    before = datetime.now(UTC).date()
    document = report.document({"seeds": 3}, [{"a_s": 1.0}], total=7)
    assert before <= date.fromisoformat(document["date"]) <= datetime.now(UTC).date()
    assert document["total"] == 7
    assert document["settings"] == {"seeds": 3}
    assert document["rows"] == [{"a_s": 1.0}]
    assert document["machine"]["cores"] >= 1
    assert document["versions"].keys() >= {"python", "minato-gpu", "torch", "numpy"}


def test_a_file_holds_plain_json_and_a_dash_is_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = {"nan": math.nan, "inf": [math.inf], "numpy": np.float32(0.5), "path": tmp_path, "pair": (1, True)}
    report.write(content, tmp_path / "new" / "report.json")
    read = json.loads((tmp_path / "new" / "report.json").read_text())
    assert read == {"nan": None, "inf": [None], "numpy": 0.5, "path": str(tmp_path), "pair": [1, True]}
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["report.json"]
    report.write({"a": 1}, "-")
    assert json.loads(capsys.readouterr().out) == {"a": 1}
