"""Tables of commands at several widths: no word of a header and no number is broken, and no line is too long."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from benchmarks import gpu_session, report
from minato_gpu.cli import main
from minato_gpu.console import Column, column, open_console, show, show_columns
from minato_gpu.demo import display

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "cpu-2-cores"
WIDTHS = (80, 120, 160)
RECORDED = {
    "benchmarks.compare.__main__": "compare_image_classification",
    "benchmarks.cost_model": "cost_model",
    "benchmarks.large": "large",
    "benchmarks.overhead": "overhead",
    "benchmarks.saves": "saves",
    "benchmarks.scaling.__main__": "scaling_named",
    "benchmarks.tails": "tails",
    "minato_gpu.simulation.comparison": "simulation",
}
LARGEST = {"case": "training with a step of ResNet-50", "name": "hybrid, out of order", "why": "a reason " * 20}


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
    keys = getattr(import_module(module), "_COLUMNS", None) or list(rows[0])
    case = [row for row in rows if row.get("case") == rows[0].get("case")]
    shown = [key for key in keys if any(row.get(key) is not None for row in case)]
    check(printed(width, "a title", case, keys), width, [column(key, [row.get(key) for row in case]) for key in shown])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("keys", [gpu_session._COLUMNS, gpu_session._TARGET_COLUMNS])
def test_what_is_not_recorded_yet_fits(keys: Sequence[str], width: int) -> None:
    rows = [{key: LARGEST.get(key, 123_456.789) for key in keys}] * 3
    check(printed(width, "gpu session", rows, keys), width, [column(key, [row[key] for row in rows]) for key in keys])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("epochs", [1, 20])
def test_the_summary_of_the_demonstration_fits(epochs: int, width: int) -> None:
    rows = [{"epoch": epoch, **{key: 1234.5 for _, key, _ in display._LINES}} for epoch in range(epochs)]
    out = StringIO()
    columns = display.summary_columns(rows)
    show_columns(Console(file=out, width=width), "a title", columns)
    check(out.getvalue(), width, columns)


@pytest.mark.parametrize("width", WIDTHS)
def test_commands_and_benchmarks_keep_to_the_width(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    listed = CliRunner().invoke(main, ["simulate", "--list"]).output
    assert "surprise-cut" in listed.split() and max(map(len, listed.splitlines())) <= width
    report.print_table("a benchmark", [{"loader": "a loader", "samples_per_s": 12.0}], ("loader", "samples_per_s"))
    assert "samples/s" in capsys.readouterr().out.split()


def test_a_file_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert open_console(None).width == 160


def test_tables_that_follow_name_their_rows() -> None:
    columns = [column("loader", ["one", "two"]), *(column(f"figure_{n}", [n + 0.25, 1000.0 * n]) for n in range(20))]
    out = StringIO()
    show_columns(Console(file=out, width=80), "wide", columns)
    heads = [line.split() for line in out.getvalue().splitlines() if "loader" in line]
    assert len(heads) == 3 and all(head[:2] == ["#", "loader"] for head in heads)
    assert len([line for line in out.getvalue().splitlines() if line.split()[:2] == ["2", "two"]]) == 3


@pytest.mark.parametrize(
    ("values", "cells"),
    [
        ([0.98765, 0.5], ["0.988", "0.500"]),
        ([0.02861, 0.3], ["0.029", "0.300"]),
        ([0.02861, 0.0], ["0.0286", "0.0000"]),
        ([1.25, 0.1], ["1.250", "0.100"]),
        ([12345.6, 0.5], ["12,345.6", "0.5"]),
        ([1.0, 3.0], ["1", "3"]),
        ([math.nan, math.inf, 2.5], ["nan", "inf", "2.500"]),
        ([None, 12_345], ["-", "12,345"]),
        ([True, False], ["yes", "no"]),
        (["[bold]as it is[/bold]"], ["[bold]as it is[/bold]"]),
    ],
)
def test_numbers_of_a_column_have_as_many_digits(values: list[Any], cells: list[str]) -> None:
    assert column("a_column", values).cells == cells


def test_text_is_shown_as_it_is() -> None:
    assert "[bold]x[/bold]" in printed(80, "a [title]", [{"text": "[bold]x[/bold]"}], None)
